"""Attack the sandbox of this machine and say what held.

    python pipeline/check_sandbox.py
    python pipeline/check_sandbox.py --isolation process      # what the weaker kind does not hold; harmless ones only

Each attack is a program that runs inside and tries to reach out; it prints BREACH when it got through. Exit 0 = all
held, 1 = something got through, 2 = there is no sandbox here.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline import sandbox
from pipeline.command_line import Parser
from pipeline.files import run_cli
from pipeline.sandbox import PYTHON, Finished, Isolation, Limits

SECRET = "trace-secret-7351"
Held = Callable[[Finished], bool]


def quiet(finished: Finished) -> bool:
    """The program ran to its end and said that it got nowhere."""
    return finished.returncode == 0 and b"tried" in finished.stdout and b"BREACH" not in finished.stdout


@dataclasses.dataclass(frozen=True)
class Attack:
    """``code`` may use OUTSIDE (a folder with a secret file), PARENT (a process id) and PORT (a listening socket)."""

    name: str
    what: str
    code: str
    held: Held = quiet
    limits: Limits = dataclasses.field(default_factory=lambda: Limits(wall_s=20))
    harmless: bool = True  # also where nothing holds it; the others are tried behind bwrap only


_READ = """
import os
for path in (OUTSIDE + "/secret", "/etc/shadow", "/etc/passwd", "/proc/1/environ", f"/proc/{PARENT}/environ"):
    try:
        data = open(path, errors="replace").read()
    except OSError:
        continue
    if SECRET in data or "root:" in data:
        print("BREACH", path)
print("tried")
"""
_ENVIRONMENT = """
import os
print("BREACH" if SECRET in str(os.environ) else "tried")
"""
_LINK = """
import os
os.chdir("/tmp")
try:
    os.symlink(OUTSIDE + "/secret", "link-" + str(os.getpid()))
    print("BREACH" if SECRET in open("link-" + str(os.getpid())).read() else "")
except OSError:
    pass
print("tried")
"""
_WRITE = """
import os
for folder in ("/usr", "/etc", "/", OUTSIDE, "/dev", "/var/tmp", os.path.dirname(os.__file__)):
    try:
        path = os.path.join(folder, "trace-attack")
        open(path, "w").close()
        os.unlink(path)
        print("BREACH", folder)
    except OSError:
        pass
print("tried")
"""
_NETWORK = """
import socket
for host in (("127.0.0.1", PORT), ("1.1.1.1", 53)):
    try:
        socket.create_connection(host, 1).close()
        print("BREACH", host)
    except OSError:
        pass
print("tried")
"""
_SIGNAL = """
import os
for pid in (PARENT, os.getppid()):
    try:
        os.kill(pid, 0)
        if pid > 10:
            print("BREACH", pid)
    except OSError:
        pass
print("tried")
"""
_PROCESSES = """
import os
if any(p.isdigit() and int(p) == PARENT for p in os.listdir("/proc")):
    print("BREACH the parent is visible")
print("tried")
"""
_PRIVILEGES = """
import ctypes, os, tempfile
libc = ctypes.CDLL(None)
mine = tempfile.mkdtemp().encode()  # only ever on a folder of its own: a mount elsewhere would be felt outside
if libc.mount(b"none", mine, b"tmpfs", 0, None) == 0:
    libc.umount2(mine, 2)
    print("BREACH mount")
for call in (lambda: os.chown(mine, 1, 1), lambda: os.setuid(0) if os.getuid() else None, lambda: os.chroot(mine)):
    try:
        call()
        print("BREACH" if os.getuid() or call.__code__.co_names[0] != "setuid" else "")
    except OSError:
        pass
print("tried")
"""
_FORK = """
import os, time
n = 0
try:
    while n < 400:
        if os.fork() == 0:
            time.sleep(6)
            os._exit(0)
        n += 1
except OSError:
    pass
print("BREACH" if n > 40 else "tried", flush=True)
os._exit(0)
"""
_MEMORY = """
try:
    x = bytearray(3 << 30)
    x[:: 4096] = b"x" * len(x[:: 4096])
    print("BREACH")
except MemoryError:
    pass
print("tried")
"""
_MEMORY_OF_MANY = """
import os, signal, time
for _ in range(12):
    if os.fork() == 0:
        x = bytearray(100 << 20)
        time.sleep(8)
        os._exit(0)
time.sleep(8)
print("BREACH 1.2 GiB in 12 processes", flush=True)
os._exit(0)
"""
_HIDDEN_MEMORY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if hasattr(os, "memfd_create"):
    try:
        os.memfd_create("x")
        print("BREACH memfd")
    except OSError:
        pass
shared = libc.shmget(0, 1 << 20, 0o1600)
if shared >= 0:
    libc.shmctl(shared, 0, None)
    print("BREACH System V shared memory")
print("tried")
"""
_NAMESPACES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, flags in (("user", 0x10000000), ("user and mounts", 0x10020000), ("network", 0x40000000)):
    if libc.unshare(flags) == 0:
        print("BREACH a namespace of its own:", name)
child = libc.syscall({"x86_64": 56, "aarch64": 220}[os.uname().machine], 0x10000000 | 17, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
print("BREACH clone" if child > 0 else "tried")
"""
_SOCKETS = """
import socket
for family in (40, 16, 38):  # VSOCK reaches the host of a virtual machine; netlink, kernel crypto
    try:
        socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_RAW).close()
        print("BREACH family", family)
    except OSError:
        pass
print("tried")
"""
_QUIET_SLEEP = """
import os, time
os.close(1)
os.close(2)
time.sleep(60)
"""
_DISK = """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
n = 0
try:
    for i in range(60):
        with open(f"/tmp/trace-attack-{i}", "wb") as f:
            f.write(b"x" * (8 << 20))
            f.flush()
        n += 8
except OSError:
    pass
import glob, os
for path in glob.glob("/tmp/trace-attack-*"):
    os.unlink(path)
print("BREACH" if n > 100 else "tried", n)
"""
_DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(PYTHON, [PYTHON, "-c", "import time; time.sleep(8)", MARK])
    os._exit(0)
time.sleep(0.5)
print("tried")
"""

ATTACKS = (
    Attack("read secrets", "files of the user, /etc, /proc/*/environ", _READ),
    Attack("environment", "tokens in environment variables", _ENVIRONMENT),
    Attack("symlinks", "a link to a file outside", _LINK),
    Attack("write outside", "system folders, /dev, this Python", _WRITE, harmless=False),
    Attack("network", "a server on this machine, and the internet", _NETWORK),
    Attack("signals", "a signal to the parent", _SIGNAL),
    Attack("see processes", "the parent in /proc", _PROCESSES),
    Attack("privileges", "mount, chroot, become root", _PRIVILEGES, harmless=False),
    Attack("fork bomb", "400 processes", _FORK, limits=Limits(wall_s=20, processes=20), harmless=False),
    Attack("memory", "3 GiB", _MEMORY),
    Attack("memory of many", "1.2 GiB in twelve processes", _MEMORY_OF_MANY, lambda f: f.stopped == "memory_mb",
           Limits(wall_s=20, memory_mb=512), harmless=False),
    Attack("hidden memory", "memory that no process has mapped", _HIDDEN_MEMORY),
    Attack("namespaces", "root in a user namespace of its own", _NAMESPACES),
    Attack("sockets", "families that know no network namespace", _SOCKETS),
    Attack("fill the disk", "480 MiB in /tmp", _DISK, harmless=False),
    Attack("daemon", "a process that outlives the sandbox", _DAEMON),
    Attack("run for ever", "past the CPU limit", "while True: pass", lambda f: f.returncode != 0, Limits(cpu_s=1)),
    Attack(
        "sleep for ever",
        "idle, past the wall limit",
        "import time\ntime.sleep(60)",
        lambda f: f.stopped == "wall_s",
        Limits(wall_s=1),
    ),
    Attack(
        "silent for ever",
        "closes its output, past the wall limit",
        _QUIET_SLEEP,
        lambda f: f.stopped == "wall_s" and f.seconds < 10,
        Limits(wall_s=1),
    ),
    Attack(
        "output flood",
        "endless output",
        "while True: print('x' * 65536)",
        lambda f: f.stopped == "output_mb" and len(f.stdout) <= 1 << 20,
        Limits(output_mb=1),
    ),
)  # fmt: skip


def attempt(attack: Attack, isolation: Isolation) -> tuple[bool, Finished]:
    """Run one attack; True when the sandbox held.

    Raises:
        ValueError: an attack that does harm where nothing holds it, outside of bwrap.
    """
    if isolation.kind != "bwrap" and not attack.harmless:
        raise ValueError(f"{attack.name}: tried behind bwrap only")
    mark = f"trace-daemon-{os.getpid()}-{time.monotonic_ns()}"
    with (
        tempfile.TemporaryDirectory(prefix="trace-outside-") as outside,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        (Path(outside) / "secret").write_text(SECRET)
        os.chmod(outside, 0o755)
        values = {
            "SECRET": SECRET,
            "OUTSIDE": outside,
            "PARENT": os.getpid(),
            "PORT": server.getsockname()[1],
            "PYTHON": PYTHON,
            "MARK": mark,
        }
        header = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        os.environ["TRACE_SECRET"] = SECRET
        try:
            argv = [PYTHON, "-I", "-c", header + attack.code]
            finished = sandbox.run(argv, isolation=isolation, limits=attack.limits)
        finally:
            del os.environ["TRACE_SECRET"]
        return attack.held(finished) and not _still_running(mark), finished


def _still_running(mark: str) -> bool:
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        if not any(_has(p, mark) for p in Path("/proc").iterdir() if p.name.isdigit()):
            return False
        time.sleep(0.05)
    return True


def _has(process: Path, mark: str) -> bool:
    try:
        return (process / "cmdline").read_text(errors="replace").rstrip("\0").endswith(mark)
    except OSError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--isolation", default="auto", choices=("auto", "bwrap", "process"), help="kind to attack")
    args = parser.parse_args(argv)
    isolation = sandbox.find_isolation(args.isolation)
    user = "a user of its own" if isolation.own_uid else "the same user"
    sys.stdout.write(f"isolation {isolation.kind}, {user} in each sandbox\n")
    tried = breached = 0
    for attack in ATTACKS:
        if isolation.kind != "bwrap" and not attack.harmless:
            sys.stdout.write(f"  {'-':8}{attack.name:18}not tried: it would do harm outside\n")
            continue
        tried += 1
        held, finished = attempt(attack, isolation)
        breached += not held
        verdict = "held" if held else "BREACH"
        sys.stdout.write(f"  {verdict:8}{attack.name:18}{attack.what:46}{finished.seconds:6.2f} s\n")
    sys.stdout.write(f"{tried - breached} of {tried} held\n")
    return 1 if breached else 0


if __name__ == "__main__":
    run_cli(main)
