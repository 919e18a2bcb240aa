"""The job of the evidence run on a lent machine: pieces, packs, a fresh machine. Stages and server are stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "benchmarks" / "gpu" / "helpdesk.sh"
PAGE = ROOT / "benchmarks" / "gpu_helpdesk.md"

# In place of Python: the server answers, the runner leaves a record more each time; everything else is the real one.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
  -c*) exit 0 ;;
  *helpdesk_gpu/run.py*)
    found=$(ls "$RUN/done" 2>/dev/null | tr '\\n' ' ')
    echo "run limit=$LIMIT_S size=$SIZE url=$VLLM_BASE_URLS found=$found $*" >>"$CALLS"
    mkdir -p "$RUN/done" "$RUN/logs" "$RUN/results"
    echo '{"seconds": 1.0, "peak_bytes": 1, "command": []}' >"$RUN/done/0$(ls "$RUN/done" | wc -l)_stage.json"
    exit "${CODE:-75}" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with a server that is up."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k not in ("STATE_FROM", "WORK", "LIMIT_S", "VLLM_BASE_URLS")}
    (tmp_path / "model").mkdir()
    return env | {
        "PYTHON": str(python), "REAL_PYTHON": sys.executable, "CALLS": str(tmp_path / "calls"), "SIZE": "tiny",
        "RUN": str(tmp_path / "run"), "MODEL": str(tmp_path / "model"), "PORT": "65011", "TOTAL_S": "100",
    }  # fmt: skip


def piece(env: dict[str, str], out: Path, code: int, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", str(JOB)], env=env | {"OUT": str(out)} | more, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def calls(env: dict[str, str]) -> list[str]:
    return Path(env["CALLS"]).read_text().splitlines()


def test_a_piece_keeps_time_for_its_pack_and_says_that_it_is_not_the_last(
    machine: dict[str, str], tmp_path: Path
) -> None:
    done = piece(machine, tmp_path / "out", 75)
    assert "ended with 75" in done.stdout
    (call,) = calls(machine)
    limit = int(call.split("limit=")[1].split()[0])
    assert 30 <= limit <= 55 and "size=tiny" in call and "url=http://127.0.0.1:65011" in call
    assert f"--limit-s {limit} --run {machine['RUN']}" in call
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "pack01.text.tar.xz.00", "pack01.weights.tar.00", "results.tgz",
    ]  # fmt: skip


def test_on_a_fresh_machine_the_packs_come_before_the_stages(machine: dict[str, str], tmp_path: Path) -> None:
    piece(machine, tmp_path / "one", 75)
    piece(machine, tmp_path / "two", 75)  # the same machine: goes on by itself
    fresh = machine | {"RUN": str(tmp_path / "fresh"), "STATE_FROM": f"{tmp_path / 'one'} {tmp_path / 'two'}"}
    piece(fresh, tmp_path / "three", 0, CODE="0")
    found = [call.split("found=")[1].split(" /")[0].split() for call in calls(machine)]
    assert [[n for n in names if n.endswith("_stage.json")] for names in found] == [
        [], ["00_stage.json"], ["00_stage.json", "01_stage.json"],
    ]  # fmt: skip
    assert (tmp_path / "three" / "pack03.text.tar.xz.00").exists()  # no number twice, whoever packed


def test_a_failed_stage_still_packs_and_its_code_is_the_piece_s(machine: dict[str, str], tmp_path: Path) -> None:
    piece(machine, tmp_path / "out", 2, CODE="2")
    assert (tmp_path / "out" / "results.tgz").exists()


def test_without_time_for_stages_the_limit_stays_positive(machine: dict[str, str], tmp_path: Path) -> None:
    piece(machine, tmp_path / "out", 75, TOTAL_S="10")
    assert "limit=1 " in calls(machine)[0]


def test_damaged_packs_end_the_piece_before_anything_is_started(machine: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = piece(machine, tmp_path / "out", 2, STATE_FROM=str(tmp_path / "empty"))
    assert "no pack there" in done.stderr and not Path(machine["CALLS"]).exists()


def test_after_damaged_packs_the_whole_ones_are_unpacked(machine: dict[str, str], tmp_path: Path) -> None:
    for out in ("one", "two"):
        piece(machine, tmp_path / out, 75)
    text = tmp_path / "two" / "pack02.text.tar.xz.00"
    whole = text.read_bytes()
    text.write_bytes(whole[:100])
    fresh = machine | {"RUN": str(tmp_path / "fresh"), "STATE_FROM": f"{tmp_path / 'one'} {tmp_path / 'two'}"}
    assert "damaged" in piece(fresh, tmp_path / "three", 2).stderr
    text.write_bytes(whole)
    piece(fresh, tmp_path / "three", 75)
    assert "01_stage.json" in calls(machine)[-1]


def page_script() -> str:
    """The job script that the page shows for a machine without network."""
    return PAGE.read_text(encoding="utf-8").split("```bash\n")[1].split("```")[0]


def test_the_script_of_the_page_unpacks_the_kit_once_and_passes_everything_on(
    machine: dict[str, str], tmp_path: Path
) -> None:
    kit, script = tmp_path / "kit", tmp_path / "helpdesk.sh"
    (kit / "st").mkdir(parents=True)
    (kit / "st" / "unpack_kit.sh").write_text(
        'cd "$1/.."\necho once >>unpacked\nmkdir -p models/smollm2\necho {} >models/smollm2/config.json\n'
    )
    script.write_text(page_script())
    env = {k: v for k, v in machine.items() if k not in ("RUN", "MODEL", "TOTAL_S")} | {"KIT": str(kit)}
    for out in ("one", "two"):
        done = subprocess.run(
            ["bash", str(script), "100"], env=env | {"OUT": str(tmp_path / out), "RUN": "unused"}, cwd=ROOT,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 75, done.stderr
    assert (kit / "unpacked").read_text() == "once\n"
    first, second = calls(machine)
    assert f"--model {kit}/models/smollm2" in first and f"--run {kit}/runs/helpdesk_tiny" in first
    assert "00_stage.json" in second and (tmp_path / "two" / "pack02.text.tar.xz.00").exists()


def test_a_kit_that_does_not_unpack_ends_the_script(machine: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "st").mkdir()
    (tmp_path / "st" / "unpack_kit.sh").write_text("echo 'chunk missing' >&2; exit 3\n")
    script = tmp_path / "helpdesk.sh"
    script.write_text(page_script())
    env = {k: v for k, v in machine.items() if k != "SIZE"} | {"KIT": str(tmp_path), "OUT": str(tmp_path / "out")}
    done = subprocess.run(["bash", str(script), "100"], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "chunk missing" in done.stderr and not Path(machine["CALLS"]).exists()


STUB = """#!/usr/bin/env bash
# stands for Python: a server that lives until a run fails with it, as the first DEATHS of them do
echo "$*" >>HERE/calls
case "$*" in
  -c*) [ -f HERE/alive ] ;;
  *api_server*) touch HERE/alive; while [ -f HERE/alive ]; do sleep 0.1; done ;;
  *run.py*) [ "$(grep -c run.py HERE/calls)" -gt "$DEATHS" ] && exit 0; rm HERE/alive; exit 2 ;;
esac
"""


@pytest.mark.parametrize(("deaths", "code", "servers"), [(1, 0, 2), (9, 2, 3)])
def test_a_piece_goes_on_with_another_server_when_its_own_dies(
    tmp_path: Path, deaths: int, code: int, servers: int
) -> None:
    """Three at most, and none is started that no run would use."""
    stub = tmp_path / "python"
    stub.write_text(STUB.replace("HERE", str(tmp_path)))
    stub.chmod(0o755)
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    env = os.environ | {"PYTHON": str(stub), "RUN": str(tmp_path / "run"), "OUT": str(tmp_path / "out"), "SIZE": "tiny"}
    env |= {"MODEL": str(tmp_path / "model"), "STATE": str(tmp_path / "server"), "WORK": str(tmp_path / "work")}
    env |= {"DEATHS": str(deaths)}
    done = subprocess.run(["bash", str(JOB)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    (tmp_path / "alive").unlink(missing_ok=True)
    subprocess.run(["bash", "examples/helpdesk_gpu/server.sh", "stop"], cwd=ROOT, env=env, check=True)
    assert done.returncode == code, done.stderr
    assert "the server died after" in done.stdout and f"ended with {code}" in done.stdout
    calls = (tmp_path / "calls").read_text()
    assert calls.count("api_server") == calls.count("run.py --model") == servers and calls.count("state.py pack") == 1
