"""Hostile programs, and a script that runs all of them and tells what they achieved.

Standard library only, so that the tests can have it run by another user: `python hostile.py FOLDER PATHS...`. A program
gets on its standard input what it is to attack, as JSON; it prints `harm` if it succeeds, and `harm` is the right answer.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvbench_tasks.sandbox import judge
from kvbench_tasks.sandbox.box import Limits

MIB = 1 << 20
LIMITS = Limits(cpu=1, memory=256 * MIB, disk=8 * MIB, processes=16)
SECONDS = 1.5
SLOW = 15.0

HOSTILE = {
    "endless loop": "while True: pass",
    "endless sleep": "import time\ntime.sleep(1000)",
    "endless output": "while True:\n    try: print('harm' * 1000)\n    except OSError: pass",
    "endless output in one line": "import sys\nwhile True: sys.stdout.write('x' * 65536)",
    "standard output closed, then hangs": "import os, time\nos.close(1)\ntime.sleep(1000)",
    "everything closed": "import os\nos.closerange(0, 1000)\nwhile True: pass",
    "signals ignored": """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(1)
""",
    "fork bomb": """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
    "fork bomb of daemons": """
import os, time
for _ in range(1000):
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork(): os._exit(0)
            time.sleep(1000)
    except OSError: pass
time.sleep(1000)
""",
    "threads without end": """
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(1000,)).start()
    except RuntimeError: pass
""",
    "more processes than allowed": """
import os, time
made = 0
try:
    for _ in range(100):
        if os.fork() == 0: time.sleep(1000)
        made += 1
except OSError: pass
if made > 20: print('harm')
""",
    "a daemon that outlives": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
""",
    "memory hog": """
held = []
while True: held.append(bytearray(1 << 24))
""",
    "memory hogs together": """
import os, time
for _ in range(3): os.fork()
held = []
for _ in range(20): held.append(b'x' * (10 << 20)); time.sleep(0.01)
time.sleep(0.5)
print('harm')
""",
    "one enormous object": "print('harm' if len('x' * (1 << 40)) else '')",
    "memory outside every limit": """
import os
try: os.memfd_create('x')
except OSError: pass
else: print('harm')
""",
    "huge recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f() + 1\nf()",
    "crash of the interpreter": "import ctypes\nctypes.string_at(0)",
    "huge source": "x = " + "(" * 100_000 + ")" * 100_000,
    "disk filled": """
import os
written = 0
for name in range(10_000):
    try:
        with open(f'/tmp/{name}', 'wb') as file: written += file.write(b'x' * (1 << 20))
    except OSError: break
print('harm' if written > 16 << 20 else 'full')
""",
    "files without end": """
made = 0
try:
    for made in range(100_000): open(f'/tmp/{made}', 'w').close()
except OSError: pass
print('harm' if made > 50_000 else 'full')
""",
    "home folder and secrets read": """
import json
for path in json.load(open(0))['secrets']:
    try: open(path).read()
    except OSError: continue
    print('harm')
""",
    "secrets read by another way": """
import glob, json, os
for path in json.load(open(0))['secrets']:
    for root in glob.glob('/proc/*/root') + glob.glob('/proc/*/cwd') + ['/..', '/proc/self/root/..']:
        try: open(root + path).read()
        except OSError: continue
        print('harm')
    for name in ('..', '../..', '/'):
        try: os.chroot(name)
        except OSError: continue
        print('harm')
""",
    "environment read": """
import glob, os
seen = [str(sorted(os.environ))]
for path in glob.glob('/proc/*/environ'):
    try: seen.append(open(path).read())
    except OSError: pass
if any('KVBENCH_SECRET' in text for text in seen): print('harm')
""",
    "other processes seen": """
import os
if any(int(name) > 100 for name in os.listdir('/proc') if name.isdecimal()): print('harm')
""",
    "a file left outside": """
import json
for folder in {*json.load(open(0))['folders'], '/', '/usr/lib', '/etc', '/dev', '/proc'} - {'/tmp'}:
    try: open(folder + '/kvbench-harm', 'w').write('x')
    except OSError: continue
    print('harm')
""",
    "file system changed": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
done = [libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.umount2(b'/usr/lib', 2), libc.umount2(b'/', 2)]
done += [libc.mount(None, b'/', None, 32 | 4096, None), libc.mknod(b'/tmp/disk', 0o60666, 254 << 8)]
if 0 in done: print('harm')
""",
    "rights taken": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
done = [libc.unshare(flag) for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000)]
done += [libc.setuid(0), libc.setgid(0), libc.setgroups(0, None)]
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
rights = any(int(status[name], 16) for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb'))
if 0 in done or rights or status['NoNewPrivs'].strip() != '1' or os.getuid() == 0: print('harm')
""",
    "limits raised": """
import resource
for name in ('RLIMIT_CPU', 'RLIMIT_AS', 'RLIMIT_NPROC', 'RLIMIT_FSIZE', 'RLIMIT_NOFILE'):
    number = getattr(resource, name)
    try: resource.setrlimit(number, (resource.getrlimit(number)[1] + 1,) * 2)
    except (OSError, ValueError): continue
    print('harm')
""",
    "parent killed": """
import json, os, signal
for pid in [os.getppid(), 1, *json.load(open(0))['pids'], -1]:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL):
        try: os.kill(pid, number)
        except OSError: pass
print('harmless')
""",
    "parent stopped": """
import os, signal, time
for pid in (1, os.getppid()):
    for number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGCHLD, signal.SIGTERM): os.kill(pid, number)
time.sleep(1000)
""",
    "parent traced": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
done = [libc.ptrace(16, pid, 0, 0) for pid in (1, os.getppid())]
for path in ('/proc/1/mem', '/proc/1/maps', '/proc/1/environ', '/proc/1/root/etc'):
    try: open(path, 'rb').read(1)
    except OSError: continue
    done.append(0)
if 0 in done: print('harm')
""",
    "network": """
import json, socket
for family, address in json.load(open(0))['addresses']:
    try: socket.socket(family).connect(tuple(address) if isinstance(address, list) else address)
    except OSError: continue
    print('harm')
""",
    "answer forged by exit code": "raise SystemExit(0)",
    "answer forged at once": "import os\nos._exit(0)",
    "answer forged in the reply": """
import glob, os
for path in glob.glob('/proc/*/fd/*'):
    try: os.write(os.open(path, os.O_WRONLY), b'{"passed": true}\\n{"ready": true}\\n{"output": true}\\n')
    except OSError: pass
""",
    "not a program": "this is not Python",
    "null bytes": "x = '\0'",
    "lone surrogates": "print('\\ud800')",
}


def main(folder: str, *secrets: str) -> dict[str, Any]:
    """Run all of them; returns which achieved something, what is left of them, and how long each took."""
    os.environ["KVBENCH_SECRET"] = "1"
    marker = uuid.uuid4().hex
    plain = judge._source
    judge._source = lambda guest: f"{plain(guest)}\n# {marker}\n"  # type: ignore[assignment]  # to find processes by
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0kvbench-{marker}")
        abstract.listen()
        target = json.dumps(
            {
                "secrets": [*secrets, "/etc/shadow", "/etc/passwd", str(Path.home() / ".bashrc"), __file__],
                "folders": [folder, str(Path.cwd()), str(Path.home()), str(Path(__file__).parent)],
                "pids": [os.getpid(), victim.pid],
                "addresses": [
                    (socket.AF_INET, server.getsockname()),
                    (socket.AF_INET, ("192.0.2.1", 80)),
                    (socket.AF_UNIX, f"\0kvbench-{marker}"),
                ],
            }
        )
        before = _state(folder)
        with ThreadPoolExecutor(10) as pool:
            control = _run("print('harm')", target)[0]
            results = dict(zip(HOSTILE, pool.map(lambda name: _run(HOSTILE[name], target), HOSTILE), strict=True))
        after = _state(folder)
    alive = victim.poll() is None
    victim.kill()
    victim.communicate()
    return {
        "harm": [name for name, (passed, _) in results.items() if passed],
        "control": control,
        "slow": {name: seconds for name, (_, seconds) in results.items() if seconds > SLOW},
        "left": [
            name for name, old, new in zip(("mounts", "files", "descriptors"), before, after, strict=True) if old != new
        ],
        "processes": processes(marker),
        "victim": alive,
        "uid": os.getuid(),
    }


def _run(program: str, target: str) -> tuple[bool, float]:
    start = time.monotonic()
    passed = judge.passes_tests(program, [(target, "harm")], lambda said, harm: harm in said, LIMITS, SECONDS)
    return passed, time.monotonic() - start


def _state(folder: str) -> tuple[str, list[Path], int]:
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    return mounts, sorted(Path(folder).iterdir()), len(list(Path("/proc/self/fd").iterdir()))


def processes(marker: str) -> dict[str, str]:
    """Command lines by number: guests and what they forked carry their source in theirs, launchers in hexadecimal."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if marker in line or marker.encode().hex() in line:
            found[path.parent.name] = line
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
