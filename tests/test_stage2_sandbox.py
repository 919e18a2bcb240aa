"""The sandbox under attack: each attack is code that tries to reach out, and must come back with nothing."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import sandbox
from pipeline.check_sandbox import ATTACKS, Attack, attempt
from pipeline.files import InputError
from pipeline.sandbox import PYTHON, Finished, Isolation, Limits, find_isolation, kill, run, start
from pipeline.sandbox_memory import MemoryWatch, SandboxProcess
from pipeline.sandbox_seccomp import DENIED, seccomp_filter

needs_bwrap = pytest.mark.skipif(
    sandbox._probe_bwrap()[0] is None, reason=f"no bubblewrap: {sandbox._probe_bwrap()[1]}"
)


def attack(code: str, *, limits: Limits | None = None, **options: object) -> Finished:
    return run([PYTHON, "-I", "-c", code], limits=limits or Limits(wall_s=20), **options)  # type: ignore[arg-type]


def said(code: str, **options: object) -> str:
    finished = attack(code, **options)
    assert finished.returncode == 0, finished.stderr.decode()
    return finished.stdout.decode()


# --------------------------------------------------------------------------- plain use


@needs_bwrap
def test_runs_a_program_with_its_input() -> None:
    finished = run([PYTHON, "-I", "-c", "import sys; print(sys.stdin.read()[::-1], end='')"], stdin=b"abc" * 100_000)
    assert finished.returncode == 0 and finished.stdout == b"cba" * 100_000 and finished.stopped is None


@needs_bwrap
def test_exit_codes_and_stderr_come_back() -> None:
    finished = attack("import sys; sys.stderr.write('why'); sys.exit(7)")
    assert (finished.returncode, finished.stderr) == (7, b"why")


@needs_bwrap
def test_binds_are_read_only(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("seen")
    code = (
        "print(open('/trace/in/data.txt').read())\n"
        "try:\n    open('/trace/in/data.txt', 'w')\nexcept OSError as e:\n    print(e.strerror)"
    )
    (tmp_path / "data.txt").chmod(0o666)
    (tmp_path / "private.txt").write_text("for root")
    (tmp_path / "private.txt").chmod(0o600)  # the sandbox's uid gets a readable copy
    assert said(code, binds=[(str(tmp_path), "/trace/in")]).split("\n")[:2] == ["seen", "Read-only file system"]


@needs_bwrap
def test_a_program_that_does_not_read_its_input_is_no_error() -> None:
    finished = run([PYTHON, "-I", "-c", "print('done')"], stdin=b"x" * (1 << 20))
    assert finished.returncode == 0 and finished.stdout == b"done\n"


# --------------------------------------------------------------------------- limits


@needs_bwrap
def test_wall_time() -> None:
    finished = attack("import time; time.sleep(60)", limits=Limits(wall_s=0.7))
    assert finished.stopped == "wall_s" and finished.returncode is None and finished.seconds < 5


@needs_bwrap
def test_cpu_time() -> None:
    finished = attack("while True: pass", limits=Limits(wall_s=30, cpu_s=1))
    assert finished.stopped is None and finished.returncode not in (0, None)


@needs_bwrap
def test_memory() -> None:
    finished = attack("x = bytearray(600 << 20)", limits=Limits(memory_mb=256))
    assert finished.returncode == 1 and b"MemoryError" in finished.stderr


@needs_bwrap
def test_output_flood() -> None:
    finished = attack("while True: print('x' * 65536)", limits=Limits(wall_s=30, output_mb=1))
    assert finished.stopped == "output_mb" and len(finished.stdout) <= 1 << 20


@needs_bwrap
def test_file_size_and_tmp_size() -> None:
    code = (
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "n = 0\n"
        "try:\n"
        "    for i in range(99):\n"
        "        with open(f'/tmp/{i}', 'wb') as f:\n"
        "            for _ in range(SIZE): f.write(b'x' * (1 << 20)); f.flush(); n += 1\n"
        "except OSError as e:\n    print(n, e.strerror)"
    )
    limits = Limits(file_mb=2, tmp_mb=8)
    assert said(code.replace("SIZE", "3"), limits=limits).strip() == "2 File too large"
    count, reason = said(code.replace("SIZE", "1"), limits=limits).strip().split(" ", 1)
    assert int(count) <= 8 and "No space left" in reason


@needs_bwrap
def test_memory_of_all_processes_together() -> None:
    """Each process stays under its own limit; the sum does not."""
    code = (
        "import os, time\n"
        "for _ in range(8):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(50 << 20); time.sleep(20); os._exit(0)\n"
        "time.sleep(20)"
    )
    finished = attack(code, limits=Limits(wall_s=15, memory_mb=256))
    assert finished.stopped == "memory_mb" and finished.returncode is None and finished.seconds < 10


@needs_bwrap
def test_memory_is_summed_over_daemons_and_forgotten_at_the_end() -> None:
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(40 << 20); print('up', flush=True); time.sleep(20)\n"
        "    os._exit(0)\n"
        "time.sleep(20)"
    )
    process = start([PYTHON, "-I", "-c", code], limits=Limits(memory_mb=200))
    try:
        assert process.stdout is not None and process.stdout.read(3) == b"up\n"
        watch = MemoryWatch()
        kib = watch.used_kib({process.pid: process})[process.pid]
        assert 40 << 10 < kib < 90 << 10, "the daemon counts, and code mapped from files does not"
    finally:
        kill(process)
    assert watch.used_kib({}) == {} and not process.over_memory


def test_a_watch_without_sandboxes_has_no_thread() -> None:
    watch = MemoryWatch()
    process = SandboxProcess([sys.executable, "-c", "pass"])
    watch.add(process, 1000)
    process.wait()
    deadline = time.monotonic() + 5
    while watch._thread is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert watch._thread is None


@needs_bwrap
def test_a_program_that_closes_its_output_still_has_a_deadline() -> None:
    finished = attack("import os, time; os.close(1); os.close(2); time.sleep(60)", limits=Limits(wall_s=0.7))
    assert finished.stopped == "wall_s" and finished.seconds < 5


FORK_BOMB = (
    "import os, time\n"
    "children = 0\n"
    "try:\n"
    "    for _ in range(500):\n"
    "        if os.fork() == 0:\n"
    "            time.sleep(5); os._exit(0)\n"
    "        children += 1\n"
    "except OSError:\n"
    "    pass\n"
    "print(children)"
)


@needs_bwrap
def test_fork_bomb() -> None:
    finished = attack(FORK_BOMB, limits=Limits(wall_s=20, processes=12))
    assert 0 < int(finished.stdout) <= 12
    assert finished.seconds < 15


# --------------------------------------------------------------------------- reaching out


@needs_bwrap
def test_no_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    code = (
        "import os, glob\n"
        "text = str(dict(os.environ))\n"
        "for f in glob.glob('/proc/*/environ'):\n"
        "    try: text += open(f, errors='replace').read()\n"
        "    except OSError: pass\n"
        "print(text)"
    )
    assert "sk-secret" not in said(code) and "VLLM" not in said(code)


@needs_bwrap
def test_no_other_process_is_visible() -> None:
    pids = said("import os; print(*[p for p in os.listdir('/proc') if p.isdigit()])").split()
    assert len(pids) <= 3 and str(os.getpid()) not in set(pids) - {"1", "2", "3"}


@needs_bwrap
def test_no_network() -> None:
    server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket; s = socket.create_server(('127.0.0.1', 0))\n"
            "print(s.getsockname()[1], flush=True); s.accept()",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        code = (
            "import socket\n"
            f"for host in (('127.0.0.1', {port}), ('1.1.1.1', 53)):\n"
            "    try: socket.create_connection(host, 2); print('connected')\n"
            "    except OSError as e: print('refused')"
        )
        assert said(code).split() == ["refused", "refused"]
        assert server.poll() is None, "nobody reached the server"
    finally:
        server.kill()
        server.wait()


@needs_bwrap
def test_no_files_of_the_user(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("hf_secret")
    secret.chmod(0o644)
    code = (
        "import os\n"
        f"for path in ({str(secret)!r}, '/etc/passwd', '/root', '/home', '/var', '/proc/1/root/etc'):\n"
        "    try: print(path, os.listdir(path) if os.path.isdir(path) else open(path).read())\n"
        "    except OSError: pass"
    )
    out = said(code)
    assert "hf_secret" not in out and "root:x" not in out and ".ssh" not in out


@needs_bwrap
def test_system_is_read_only() -> None:
    code = (
        "import os\n"
        "for path in ('/usr/x', '/x', '/trace', '/dev/x', '/proc/x', '/proc/sys/kernel/hostname'):\n"
        "    try:\n        open(path, 'w'); print('wrote', path)\n"
        "    except OSError: pass\n"
        "open('/tmp/x', 'w').write('private'); print('tmp ok')"
    )
    assert said(code) == "tmp ok\n"
    assert "private" not in said("import os; print(os.listdir('/tmp'))"), "every sandbox has a /tmp of its own"


@needs_bwrap
def test_symlinks_lead_nowhere(tmp_path: Path) -> None:
    """A link that the code makes, or that lies in a bound folder, is resolved inside."""
    (tmp_path / "secret").write_text("hf_secret")
    folder = tmp_path / "bound"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "secret")
    code = (
        "import os\n"
        f"os.symlink({str(tmp_path / 'secret')!r}, '/tmp/mine')\n"
        "for path in ('/tmp/mine', '/trace/in/link'):\n"
        "    try: print(open(path).read())\n"
        "    except OSError: print('nothing')"
    )
    assert said(code, binds=[(str(folder), "/trace/in")]).split() == ["nothing", "nothing"]


@needs_bwrap
def test_signals_do_not_reach_the_parent() -> None:
    got: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        code = (
            "import os, signal\n"
            f"for pid in (os.getppid(), {os.getpid()}, -1, 0 - {os.getpgrp()}):\n"
            "    try:\n        if pid not in (0, -1): os.kill(pid, signal.SIGUSR1)\n"
            "    except OSError: pass\n"
            "print('tried')"
        )
        attack(code)
        assert got == []
    finally:
        signal.signal(signal.SIGUSR1, old)


@needs_bwrap
def test_no_privileges() -> None:
    code = (
        "import os, ctypes\n"
        "status = open('/proc/self/status').read()\n"
        "print([l for l in status.splitlines() if l.startswith(('CapEff', 'CapPrm', 'NoNewPrivs'))])\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.sethostname(b'x', 1))\n"
        "try: os.setuid(0); print('uid', os.getuid())\n"
        "except OSError: print('no setuid')\n"
        "try: os.chroot('/tmp'); print('chrooted')\n"
        "except OSError: print('no chroot')"
    )
    out = said(code)
    assert out.count("0000000000000000") == 2 and "NoNewPrivs:\\t1" in out
    assert "-1 -1" in out and "no chroot" in out
    if find_isolation().own_uid:
        assert "no setuid" in out


@needs_bwrap
def test_every_sandbox_has_a_user_of_its_own() -> None:
    if not find_isolation().own_uid:
        pytest.skip("needs root outside")
    uids = {said("import os; print(os.getuid(), os.getgroups())") for _ in range(3)}
    assert len(uids) == 3 and all(int(u.split()[0]) >= 20_000 for u in uids)


DAEMON = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        for fd in range(3): os.close(fd)\n"
    "        os.execv('/bin/sleep', ['{mark}', '47'])\n"
    "    os._exit(0)\n"
    "time.sleep({wait})"
)


def _running(mark: str) -> list[str]:
    out = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "cmdline").read_text():
                    out.append(entry.name)
            except OSError:
                continue
    return out


@needs_bwrap
@pytest.mark.parametrize("wait", [0.2, 30])
def test_daemons_die_with_the_sandbox(wait: float) -> None:
    """Once when the program ends by itself, once when it is killed at its wall time."""
    mark = f"daemon-{os.getpid()}-{wait}"
    attack(DAEMON.format(mark=mark, wait=wait), limits=Limits(wall_s=2))
    deadline = time.monotonic() + 5
    while _running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _running(mark) == []


@needs_bwrap
def test_a_forged_verdict_is_only_text() -> None:
    """What a program prints or how it exits is its output; nothing here reads a verdict from it."""
    finished = attack("import atexit, os; atexit.register(lambda: print('10 passed')); os._exit(0)")
    assert finished == Finished(0, b"", b"", None, finished.seconds)


@needs_bwrap
def test_kill_ends_a_long_lived_program() -> None:
    process = start([PYTHON, "-I", "-c", "import time; print('up', flush=True); time.sleep(60)"])
    assert process.stdout is not None and process.stdout.read(3) == b"up\n"
    kill(process)
    assert process.poll() is not None
    kill(process)  # a second time is harmless


# --------------------------------------------------------------------------- no sandbox, weaker sandbox


def test_refuses_by_default_without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_probe_bwrap", lambda: (None, "bubblewrap (bwrap) is not installed"))
    for requested in ("auto", "bwrap"):
        with pytest.raises(InputError, match=r"no sandbox.*apt-get install bubblewrap.*--isolation process"):
            find_isolation(requested)
    assert find_isolation("process").kind == "process"
    with pytest.raises(InputError, match="expected auto, bwrap or process"):
        find_isolation("none")


def test_probe_says_when_bwrap_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert sandbox._probe_bwrap.__wrapped__() == (None, "bubblewrap (bwrap) is not installed")


WEAK = Isolation("process", own_uid=False)


def test_the_weaker_kind_still_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    assert "sk-secret" not in said("import os; print(dict(os.environ))", isolation=WEAK)
    assert b"MemoryError" in attack("bytearray(600 << 20)", limits=Limits(memory_mb=256), isolation=WEAK).stderr
    assert attack("import time; time.sleep(60)", limits=Limits(wall_s=0.5), isolation=WEAK).stopped == "wall_s"
    flood = attack("while True: print('x' * 65536)", limits=Limits(wall_s=20, output_mb=1), isolation=WEAK)
    assert flood.stopped == "output_mb"


def test_the_weaker_kind_does_not_wait_for_a_daemon_that_holds_the_pipes() -> None:
    code = "import os, time\nif os.fork() == 0:\n    os.setsid(); time.sleep(8); os._exit(0)\nprint('done')"
    finished = attack(code, isolation=WEAK)
    assert finished.stdout == b"done\n" and finished.seconds < 6


# --------------------------------------------------------------------------- the table for users


@needs_bwrap
@pytest.mark.parametrize("one", ATTACKS, ids=lambda a: a.name)
def test_attacks_of_the_table_are_held(one: Attack) -> None:
    held, finished = attempt(one, find_isolation("bwrap"))
    assert held, finished


@needs_bwrap
@pytest.mark.parametrize("name", ["hidden memory", "namespaces", "sockets"])
def test_the_filter_is_what_holds_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "seccomp_filter", lambda: None)
    held, finished = attempt(next(a for a in ATTACKS if a.name == name), find_isolation("bwrap"))
    if held:
        pytest.skip("this kernel refuses it anyway")
    assert b"BREACH" in finished.stdout


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_stays_inside(machine: str) -> None:
    program = seccomp_filter(machine)
    assert program is not None and seccomp_filter("s390x") is None
    steps = list(struct.iter_unpack("=HBBI", program))
    assert 2 * len(DENIED) < len(steps) < 4096, "the kernel takes 4096 steps"
    for index, (code, if_true, if_false, _) in enumerate(steps):
        if code & 0x07 == 0x05:  # a jump
            assert index + 1 + max(if_true, if_false) < len(steps)
    assert steps[-1][0] == 0x06, "the last step returns"


@pytest.mark.parametrize("name", ["read secrets", "network", "see processes"])
def test_the_table_shows_what_the_weaker_kind_does_not_hold(name: str) -> None:
    """An attack that cannot succeed anywhere would prove nothing."""
    one = next(a for a in ATTACKS if a.name == name)
    held, finished = attempt(one, WEAK)
    assert not held and b"BREACH" in finished.stdout


@pytest.mark.parametrize("one", [a for a in ATTACKS if not a.harmless], ids=lambda a: a.name)
def test_harmful_attacks_are_never_tried_without_a_sandbox(one: Attack) -> None:
    with pytest.raises(ValueError, match="behind bwrap only"):
        attempt(one, WEAK)
