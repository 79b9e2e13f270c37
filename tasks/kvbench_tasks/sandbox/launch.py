"""Runs as a process of its own: shuts itself in, then becomes the guest. Standard library and Linux only.

Started by box.py as `python -I -S launch.py SPEC`. Three processes: the *outer* one makes the namespaces and waits;
*init* is process 1 in there, builds the file system and gives up every right; the *guest* runs what somebody else
wrote. When init ends, for whatever reason, the kernel kills everything in there.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import resource
import select
import struct
import sys

# Written out, since importing typing, or json, takes longer than everything that is done here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

NOBODY = 65534
NEW_ROOT = "/tmp"  # mounted over, in a mount namespace of our own: nothing is written to a disk
DEVICES = ("null", "zero", "full", "random", "urandom")

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
APART = CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
SYS_MOUNT_SETATTR = 442  # on every processor
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION = 0x20080522

# Calls that no test needs and that would give memory which no limit counts, keys that outlive their maker, the inside
# of another process or another namespace: the processor's audit number, then the numbers of these calls there.
FORBIDDEN = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "open_by_handle_at": (304, 265),
}
PROCESSORS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

STARTED = b"started"
"""On the standard error, when nothing is left to do but to run the guest."""

libc = ctypes.CDLL(None, use_errno=True)


def main(spec: dict[str, Any]) -> NoReturn:
    """Become the guest; what goes wrong before that is one line on the standard error."""
    uid, gid = os.geteuid(), os.getegid()
    root = uid == 0
    # Root makes the file system with its own rights, since the interpreter may lie where nobody else can go, and turns
    # into nobody afterwards. Everybody else has those rights in a user namespace only.
    call("unshare", CLONE_NEWNS | CLONE_NEWPID | (0 if root else APART))
    if not root:
        be_nobody_inside(uid, gid)
    init = os.fork()
    if init:
        os.closerange(0, 3)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) & 0xFF)
    build_root(spec)
    if root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own files in /proc belong to root
        call("unshare", CLONE_NEWNS | APART)
        be_nobody_inside(NOBODY, NOBODY)
    write("/proc/sys/user/max_user_namespaces", "0")
    write("/proc/self/oom_score_adj", "1000")
    give_up_rights()
    guest = os.fork()
    if not guest:
        become_guest(spec)
    os.closerange(0, 3)
    os._exit(watch(guest, spec["lifeline"], spec["memory"]))


def be_nobody_inside(uid: int, gid: int) -> None:
    """In the user namespace that this process is in, its user is called nobody, and there is no other."""
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{NOBODY} {uid} 1")
    write("/proc/self/gid_map", f"{NOBODY} {gid} 1")


def build_root(spec: dict[str, Any]) -> None:
    """Make the only file system that the guest will see, and let go of the old one."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    # Opened before the new root can hide them.
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in spec["visible"]}
    devices = {f"/dev/{name}": os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC) for name in DEVICES}
    mount("root", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path, target in spec["links"].items():
        os.makedirs(os.path.dirname(NEW_ROOT + path), exist_ok=True)
        os.symlink(target, NEW_ROOT + path)
    for path, source in [*sources.items(), *devices.items()]:
        place(NEW_ROOT + path, os.path.isdir(path))
        if path in sources:
            bind(source, NEW_ROOT + path)
    for path in spec["hidden"]:
        if os.path.isdir(NEW_ROOT + path):
            mount("nothing", NEW_ROOT + path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=4k")
    for path in ("/proc", "/tmp"):
        place(NEW_ROOT + path, folder=True)
    read_only(NEW_ROOT)
    for path, source in devices.items():
        bind(source, NEW_ROOT + path)
    mount("proc", f"{NEW_ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    size = f"mode=1777,size={spec['disk']},nr_inodes=4096"
    mount("work", f"{NEW_ROOT}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    # The new root is put on top of the old one, which then goes away: pivot_root(2).
    os.chdir(NEW_ROOT)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def place(path: str, folder: bool) -> None:
    """Make something to mount on."""
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder and not os.path.exists(path):
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mount; `kind` None changes what is mounted."""
    call("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode())


def bind(source: int, target: str) -> None:
    """Show what is open at `source` at `target` too."""
    mount(f"/proc/self/fd/{source}", target, None, MS_BIND | MS_REC)


def read_only(path: str) -> None:
    """No writing, no rights from files and no devices, here and in everything that is mounted below."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, len(attributes))


def give_up_rights() -> None:
    """No capability, now or later; and nobody else in there looks into this process."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    call("capset", struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def become_guest(spec: dict[str, Any]) -> NoReturn:
    """Set the limits and run the guest's interpreter; the standard error closes as it starts."""
    try:
        os.dup2(2, spec["lifeline"], inheritable=False)
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        os.setsid()
        os.chdir("/tmp")
        limits = {
            resource.RLIMIT_CPU: spec["cpu"],
            resource.RLIMIT_AS: spec["memory"],
            resource.RLIMIT_FSIZE: spec["disk"],
            resource.RLIMIT_NOFILE: spec["files"],
            resource.RLIMIT_NPROC: spec["processes"] + 2,  # the outer process and init count too
            resource.RLIMIT_STACK: spec["stack"],
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        forbid()
        environment = {"HOME": "/tmp", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}
        python = spec["python"]
        os.write(spec["lifeline"], STARTED)
        os.execve(python, [python, "-S", "-s", "-P", "-X", "utf8", "-c", spec["guest"]], environment)
    except BaseException as error:  # noqa: BLE001 - it is a forked copy: it must not return
        os.write(spec["lifeline"], str(error).encode())
        os._exit(1)


def forbid() -> None:
    """Make the calls of FORBIDDEN fail with EPERM: a filter in the kernel that nothing takes back (seccomp(2))."""
    column, processor = PROCESSORS[os.uname().machine]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    refuse = 0x00050000 | errno.EPERM
    numbers = [calls[column] for calls in FORBIDDEN.values()]
    code = [
        (load, 0, 0, 4),  # which processor's numbers the caller uses: a 64-bit program can make 32-bit calls
        (equal, 1, 0, processor),
        (answer, 0, 0, refuse),
        (load, 0, 0, 0),  # which call
        (at_least, len(numbers) + 1, 0, 0x40000000),  # x32: other numbers for the same calls
        *((equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (answer, 0, 0, 0x7FFF0000),
        (answer, 0, 0, refuse),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    header = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


def watch(guest: int, lifeline: int, memory: int) -> int:
    """Wait for the guest; return its exit code, or early if the other side lets go or memory runs out.

    A limit on address space holds for a process each; what all of them hold together is looked up now and then.
    """
    events = select.poll()
    for descriptor in (lifeline, os.pidfd_open(guest)):
        events.register(descriptor, select.POLLIN)
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == guest:
                return os.waitstatus_to_exitcode(ended[1]) & 0xFF
        changed = dict(events.poll(20))
        if lifeline in changed or resident_bytes() > memory:
            return 1


def resident_bytes() -> int:
    """Memory that all processes in here hold, this one included."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/statm", encoding="ascii") as file:
                    pages += int(file.read().split()[1])
            except (OSError, IndexError):
                continue  # it has just ended
    return pages * resource.getpagesize()


def write(path: str, text: str) -> None:
    """Write a file of the kernel, which wants it in one piece."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {os.strerror(error.errno or 0)}") from error
    finally:
        os.close(file)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns -1 on failure.

    Integers are handed over as long, or the upper half of an unsigned long argument would be left to chance.
    """
    passed = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    if getattr(libc, name)(*passed) == -1:
        code = ctypes.get_errno()
        named = " ".join(value.decode() for value in arguments[:2] if isinstance(value, bytes) and value.isascii())
        raise OSError(code, f"{name} {named}".strip() + f": {os.strerror(code)}")


if __name__ == "__main__":
    try:
        main(marshal.loads(bytes.fromhex(sys.argv[1])))
    except Exception as error:  # noqa: BLE001 - it is told, and nothing has been run
        print(error.strerror if isinstance(error, OSError) else repr(error), file=sys.stderr, flush=True)
        os._exit(1)
