"""Guest: runs a data set's own check against a function that lives in another box.

First message: `entry`, the function's name; `prelude` and `check`, sources that define `check(candidate)`. It then asks
for calls (`args`, encoded) until it knows whether the function passed. The program under test is never in this box, so it
cannot touch what checks it.
"""

import json
import os
from typing import Any

from kvbench_tasks.sandbox.guests.wire import decode, encode


def main() -> None:
    """Run the check."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for descriptor in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)

    def say(message: Any) -> None:
        print(json.dumps(message), file=replies, flush=True)

    def candidate(*args: Any) -> Any:
        say({"args": encode(list(args))})
        return decode(json.loads(requests.readline())["value"])

    task = json.loads(requests.readline())
    namespace: dict[str, Any] = {}
    try:
        exec(compile(task["prelude"], "prelude.py", "exec"), namespace)
        namespace[task["entry"]] = candidate  # some checks call it by its name
        exec(compile(task["check"], "check.py", "exec"), namespace)
        check = namespace["check"]
    except BaseException as error:
        say({"broken": f"{type(error).__name__}: {error}"})
        return
    try:
        check(candidate)
    except BaseException:
        say({"passed": False})
    else:
        say({"passed": True})


if __name__ == "__main__":
    main()
