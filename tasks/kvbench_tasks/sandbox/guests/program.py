"""Guest: runs a program on inputs, or calls a function of it; each time in a child, so that no test sees another.

First message: `prelude`, source that runs once, `program`, which knows its names, and `entry` if a function is to be called.
Then `input` (the standard input) or `args` (encoded), once a test.
It is told nothing about the right answers: what a program could forge here is an answer, and it would have to be right.
"""

import builtins
import contextlib
import json
import os
import resource
import signal
import sys
from types import ModuleType
from typing import Any

from kvbench_tasks.sandbox.guests.wire import decode, encode

PLACE = "/tmp/kvbench-answer"


def main() -> None:
    """Answer requests until there are no more."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for descriptor in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as where an interpreter starts with its site module
    task: dict[str, Any] = json.loads(requests.readline())
    entry = task["entry"]
    function = None
    try:
        prelude = run(compile(task["prelude"], "prelude.py", "exec"), "prelude", {})
        code = compile(task["program"], "program.py", "exec")
        if entry is not None:
            function = find(entry, run(code, "program", prelude))
        reply: dict[str, Any] = {"ready": True}
    except BaseException as error:
        reply = {"error": type(error).__name__}
    print(json.dumps(reply), file=replies, flush=True)
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if not child:
            os.close(requests.fileno())
            os.close(replies.fileno())
            resource.setrlimit(resource.RLIMIT_CPU, (task["cpu"], task["cpu"]))
            if function is not None:
                answer = json.dumps({"value": encode(function(*decode(request["args"])))})
                with open(PLACE, "w", encoding="utf-8") as file:
                    file.write(answer)
                os._exit(0)
            feed(request["input"])
            with contextlib.suppress(SystemExit):  # the contests do not look at exit codes
                run(code, "__main__", prelude)
            raise SystemExit(0)  # through the interpreter's own end: it waits for threads and flushes
        status = os.waitpid(child, 0)[1]
        print(collect(status, entry is None, task["longest"]), file=replies, flush=True)


def run(code: Any, name: str, known: dict[str, Any]) -> dict[str, Any]:
    """Run it as a module of its own that knows these names; returns all names that there are then."""
    module = ModuleType(name)
    module.__dict__.update({key: value for key, value in known.items() if not key.startswith("__")})
    sys.modules[name] = module
    exec(code, module.__dict__)
    return module.__dict__


def find(entry: str, namespace: dict[str, Any]) -> Any:
    """A method of the program's class Solution, or a function."""
    if hasattr(namespace.get("Solution"), entry):
        return getattr(namespace["Solution"](), entry)
    return namespace[entry]


def feed(text: str) -> None:
    """Make `text` the standard input, and a file the standard output."""
    with open(PLACE + "-input", "w", encoding="utf-8", newline="") as file:
        file.write(text)
    os.dup2(os.open(PLACE + "-input", os.O_RDONLY), 0)
    os.dup2(os.open(PLACE, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), 1)


def collect(status: int, printed: bool, longest: int) -> str:
    """The child's answer as a line, or why there is none."""
    if status:
        return json.dumps({"error": "exit" if os.WIFEXITED(status) else signal.Signals(os.WTERMSIG(status)).name})
    try:
        with open(PLACE, "rb") as file:
            content = file.read(longest + 1)
        os.unlink(PLACE)
    except OSError as error:
        return json.dumps({"error": type(error).__name__})
    if len(content) > longest:
        return json.dumps({"error": "too long"})
    text = content.decode("utf-8", errors="replace")
    return json.dumps({"output": text}, ensure_ascii=False) if printed else text


if __name__ == "__main__":
    main()
