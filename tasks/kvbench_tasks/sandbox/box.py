"""A box that runs other people's Python: one process tree with nothing around it, spoken to in lines of JSON.

Standard library only. docs/sandbox.md says what is guaranteed and what is not; launch.py does it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import marshal
import os
import platform
import select
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvbench_tasks.sandbox.launch import PROCESSORS, STARTED

_START_SECONDS = 20.0
_MIB = 1 << 20
_LAUNCH = Path(__file__).with_name("launch.py")


class SandboxError(Exception):
    """The box itself does not work; says nothing about the program that was to run in it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a guest may use.

    Attributes:
        cpu: seconds of processor time of each process; it is killed at the next whole second.
        memory: bytes of address space of each process, and of resident memory of all together.
        disk: bytes in its working folder, which is in memory; also of each file.
        processes: processes and threads at a time.
        files: open files of each process.
        stack: bytes of the main thread's stack.
        reply: bytes that it may say in one line.
    """

    cpu: int = 5
    memory: int = 1024 * _MIB
    disk: int = 64 * _MIB
    processes: int = 32
    files: int = 64
    stack: int = 64 * _MIB
    reply: int = 8 * _MIB


class Box:
    """A running guest; a context manager. When it closes, nothing of the guest is left.

    Args:
        guest: source of the program that reads lines of JSON and answers each with one. It runs as `python -c`; what a
            model wrote is sent to it, so that it need not be a part of a command line.
        limits: what it may use.

    Raises:
        SandboxError: on entry, if the box cannot be made.
    """

    def __init__(self, guest: str, limits: Limits) -> None:
        self._guest = guest
        self._limits = limits
        self._said = bytearray()

    def __enter__(self) -> Self:
        ours, theirs = os.pipe()
        limits = {name: value for name, value in asdict(self._limits).items() if name != "reply"}
        spec = {**_interpreter(), **limits, "guest": self._guest, "lifeline": ours}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_LAUNCH), marshal.dumps(spec).hex()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                cwd="/",
                env={},
                pass_fds=(ours,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(theirs)
            raise SandboxError(f"{sys.executable} cannot be started: {error.strerror}") from error
        finally:
            os.close(ours)
        self._lifeline = theirs
        try:
            self._await_start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, message: Any, seconds: float) -> Any:
        """Send one message and wait for one answer.

        Returns:
            the answer; None if there is none in time, if it is no JSON or too long, or if the guest has ended.
        """
        end = time.monotonic() + seconds
        pending = memoryview(json.dumps(message).encode() + b"\n")
        source, sink = self._process.stdout, self._process.stdin
        assert source is not None
        assert sink is not None
        searched = 0
        while (line_end := self._said.find(b"\n", searched)) < 0:
            searched = len(self._said)
            left = end - time.monotonic()
            if left <= 0 or len(self._said) > self._limits.reply:
                return None
            ready = _ready({source.fileno(): select.POLLIN, sink.fileno(): select.POLLOUT if pending else 0}, left)
            if pending and sink.fileno() in ready:
                try:
                    pending = pending[os.write(sink.fileno(), pending) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    pending = pending[:0]  # it may have answered before it stopped listening
            if source.fileno() in ready:
                piece = os.read(source.fileno(), 1 << 16)
                if not piece:
                    return None
                self._said += piece
        line = bytes(self._said[:line_end])
        del self._said[: line_end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            return None

    def close(self) -> None:
        """Kill whatever still runs in the box and wait until it is gone.

        Raises:
            SandboxError: it does not go away.
        """
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"process {self._process.pid} does not end") from error

    def _await_start(self) -> None:
        """The launcher's standard error closes when the guest starts; before that it holds what went wrong."""
        told = self._process.stderr
        assert told is not None
        text = b""
        while True:
            if not _ready({told.fileno(): select.POLLIN}, _START_SECONDS):
                raise SandboxError(f"it did not start within {_START_SECONDS:g} seconds")
            piece = os.read(told.fileno(), 4096)
            if not piece:
                break
            text += piece
        if text != STARTED:
            told_last = text.removeprefix(STARTED).decode(errors="replace").strip().splitlines()
            raise SandboxError(told_last[-1] if told_last else "it ended before it started")
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)


def _ready(wanted: dict[int, int], seconds: float) -> set[int]:
    """Which of these descriptors have something to do; unlike select(2) it takes any number of them."""
    events = select.poll()
    for descriptor, kind in wanted.items():
        if kind:
            events.register(descriptor, kind)
    return {descriptor for descriptor, _ in events.poll(seconds * 1000)}


@functools.cache
def unavailable() -> str | None:
    """Why no box can be made on this machine, as half a sentence; None if one can. Tries it once."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {platform.system()}"
    if platform.machine() not in PROCESSORS:
        return f"it knows the processors {', '.join(PROCESSORS)}, and this is {platform.machine()}"
    try:
        with Box("print(input(), flush=True)", Limits()) as box:
            return None if box.ask("ready", 20.0) == "ready" else "a program in it does not answer"
    except SandboxError as error:
        return str(error)


@functools.cache
def _interpreter() -> dict[str, Any]:
    """Where Python and the libraries lie that it needs: what a guest sees, and what of that it does not."""
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    prefix = sys.base_prefix
    wanted = [
        "/lib",
        "/lib64",
        "/usr/lib",
        "/usr/lib64",
        "/etc/ld.so.cache",
        f"{prefix}/lib",
        f"{prefix}/{sys.platlibdir}",
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib", vars={"platbase": prefix}),
        python,
    ]
    links = {path: os.readlink(path) for path in wanted if os.path.islink(path)}
    visible: list[str] = []
    for path in sorted({path for path in wanted if os.path.exists(path) and path not in links}):
        if not any(path.startswith(f"{shown}/") for shown in visible):
            visible.append(path)
    packages = {sysconfig.get_path(name, vars={"base": prefix, "platbase": prefix}) for name in ("purelib", "platlib")}
    return {"python": python, "visible": visible, "links": links, "hidden": sorted(packages)}
