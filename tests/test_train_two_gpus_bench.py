"""The two-GPU benchmark: what it reads from a run, and that a run which ends early is told as such."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from pipeline.files import ServerError, read_json

sys.path.insert(0, str(ROOT))

from benchmarks import bench_two_gpus
from benchmarks.bench_two_gpus import INTERRUPTED, SIZES, GpuMeter, Servers, _wait_for, finish, summary
from train.config import build_parser, load_config


def row(iteration: int, elapsed: float, **more: Any) -> dict[str, Any]:
    times = {"sample_s": 1.0, "update_s": 0.5, "deliver_s": 0.1, "idle_share": 0.3, "trainer_idle_share": 0.6}
    base = {"iteration": iteration, "elapsed_s": elapsed, "reward": 0.1 * iteration, "sampled_tokens": 50.0}
    return {**base, "errors": 0.0, "episodes": 8.0, **times, **more}


def test_means_leave_the_iterations_out_that_compile() -> None:
    found = summary([row(1, 10.0, update_s=9.0), row(2, 12.0, update_s=5.0), row(3, 14.0), row(4, 20.0, errors=0.25)])
    assert found["update_s"] == 0.5 and found["wall_s"] == 20.0 and found["tokens_per_s"] == 10.0
    assert found["reward_first"] == 0.1 and found["reward_last"] == 0.4 and found["errors"] == 0.25
    assert summary([row(1, 2.0)])["update_s"] == 0.5, "a short run has nothing else"


def process(tmp_path: Path, code: str) -> subprocess.Popen[str]:
    (tmp_path / "train.log").write_text("what it said last")
    return subprocess.Popen([sys.executable, "-c", code], text=True, start_new_session=True)


def test_a_run_that_fails_or_hangs_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="exit code 3: what it said last"):
        finish(process(tmp_path, "import sys; sys.exit(3)"), tmp_path, 30)
    with pytest.raises(ServerError, match=r"took over 0\.3 s"):
        finish(process(tmp_path, "import time; time.sleep(60)"), tmp_path, 0.3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"iteration": 1, "sampled_tokens": 3}\n{"warning": "x"}\n')
    told = f"import sys; sys.exit({INTERRUPTED})"
    assert len(finish(process(tmp_path, told), tmp_path, 30, INTERRUPTED)) == 1
    with pytest.raises(ServerError, match=f"exit code {INTERRUPTED}"):
        finish(process(tmp_path, told), tmp_path, 30)
    (tmp_path / "run/metrics.jsonl").write_text('{"warning": "x"}\n')
    with pytest.raises(ServerError, match="without an iteration: what it said last"):
        finish(process(tmp_path, "pass"), tmp_path, 30)
    ended = process(tmp_path, "pass")
    ended.wait(30)
    with pytest.raises(ServerError, match="training ended or was too slow: what it said last"):
        _wait_for(ended, lambda: False, 5.0, tmp_path)


def test_without_a_gpu_there_is_no_utilisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with GpuMeter() as meter:
        pass
    assert meter.idle_shares() == []
    meter._rows = [[100.0, 0.0], [50.0, 0.0]]
    assert meter.idle_shares() == [0.25, 1.0]


@pytest.mark.parametrize("name", sorted(SIZES))
def test_its_flags_are_flags_of_the_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(bench_two_gpus.subprocess, "Popen", lambda command, **more: seen.update(more, command=command))
    args = argparse.Namespace(size=name, model=tmp_path)
    bench_two_gpus.train(args, ["a", "b"], "http://x:1,http://y:2", tmp_path / "f", 7)
    config = load_config(vars(build_parser().parse_args(seen["command"][3:])), {})
    assert config.capabilities == ("capability_a", "capability_b") and config.max_iters == 7
    assert seen["env"]["VLLM_BASE_URLS"] == "http://x:1,http://y:2"
    assert seen["env"].get("CUDA_VISIBLE_DEVICES") == ("1" if name == "gpu" else None)
    assert ("--kv-cache-memory-bytes" in SIZES[name].server) == (name == "gpu"), "servers start side by side"


def arguments(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        size="gpu", model=tmp_path / "model", out=tmp_path / "out.json", server_start_s=9.0, logs=tmp_path / "logs"
    )


class Server:
    """Stands for a server's process."""

    def __init__(self, model: Path, log: Path, env: dict[str, str], port: int) -> None:
        self.model, self.log, self.env, self.port, self.ended = model, log, env, port, False


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """Every server that is launched, in order; none runs."""
    found: list[Server] = []

    def launch(model: Path, flags: list[str], log: Path, env: dict[str, str], port: int) -> tuple[Server, str]:
        found.append(Server(model, log, env, port))
        return found[-1], f"http://s:{port or len(found)}"

    monkeypatch.setattr(bench_two_gpus, "launch", launch)
    monkeypatch.setattr(bench_two_gpus, "wait_until_healthy", lambda *_: None)
    monkeypatch.setattr(bench_two_gpus, "end", lambda server, **_: setattr(server, "ended", True))
    return found


def pair(tmp_path: Path, n: int) -> Servers:
    found = Servers(arguments(tmp_path), tmp_path / "model", ["--flag"], tmp_path, "real")
    for index in range(n):
        found.start(index)
    return found


def test_layout_measures_one_and_four_capabilities_on_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Server]
) -> None:
    """The first result is saved before the second run begins, and no other server shares the trainer's GPU."""
    began: list[dict[str, Any]] = []
    saved: list[dict[str, Any]] = []

    def train(args: Any, names: list[str], url: str, folder: Path) -> subprocess.Popen[str]:
        began.append({"names": names, "url": url, "saved": len(saved), "others": [s.ended for s in started]})
        lines = [json.dumps(row(k, 5.0 * k)) for k in (1, 2, 3) for _ in names]
        (folder / "run").mkdir(parents=True)
        (folder / "run/metrics.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "train.log").write_text("")
        return subprocess.Popen([sys.executable, "-c", "pass"], text=True, start_new_session=True)

    monkeypatch.setattr(bench_two_gpus, "train", train)
    servers = pair(tmp_path, 2)
    bench_two_gpus.layout(
        arguments(tmp_path), tmp_path, servers, lambda found: saved.append(json.loads(json.dumps(found)))
    )
    assert started[0].env["CUDA_VISIBLE_DEVICES"] == "0" and len({s.env["VLLM_CACHE_ROOT"] for s in started}) == 2
    assert [len(entry["names"]) for entry in began] == [1, 4] and {entry["url"] for entry in began} == {"http://s:1"}
    assert [entry["saved"] for entry in began] == [0, 1] and began[0]["others"] == [False, True]
    assert list(saved[0]["capabilities"]) == ["1"]
    found = saved[1]["capabilities"]
    assert found["4"]["iterations"] == 12 and found["1"]["tokens_per_s"] == 10.0 and "gpu_idle_shares" in found["4"]


def rollouts(command: list[str], **more: Any) -> None:
    """In place of the commands that the benchmark starts."""
    if not command[1].endswith("bench_rollouts.py"):
        return
    options = bench_rollouts_options(command)
    rate = 100.0 * len(options["--base-url"].split(","))
    result = {"tokens_per_s": rate, "saturated_tokens_per_s": 2 * rate}
    Path(options["--json-output"]).write_text(json.dumps(result))


def test_all_servers_start_at_once_and_end_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Server]
) -> None:
    """A part that fails is named, leaves the others their turn, and what was measured is on disk."""
    monkeypatch.setattr(bench_two_gpus.subprocess, "run", rollouts)
    alive: dict[str, list[str]] = {}

    def part(name: str, fail: bool) -> Any:
        def measure(args: Any, work: Path, servers: Servers, save: Any) -> None:
            alive[name] = sorted(s.log.stem for s in started if not s.ended)
            assert len(started) == 4, "before the first part"
            if fail:
                raise ServerError("it died")
            save({"value": 1})

        return measure

    monkeypatch.setitem(bench_two_gpus.PARTS, "killed", part("killed", True))
    monkeypatch.setitem(bench_two_gpus.PARTS, "layout", part("layout", False))
    record: dict[str, Any] = {}
    failed = bench_two_gpus.run(arguments(tmp_path), ["layout", "killed", "servers"], tmp_path, record)
    assert failed == {"killed": "it died"}
    assert [s.env["CUDA_VISIBLE_DEVICES"] for s in started] == ["0", "0", "1", "1"]
    real, compared = ["server_real0", "server_real1"], ["server_compared0", "server_compared1"]
    assert alive == {"killed": sorted(compared + real), "layout": sorted(compared + real)}
    assert all(s.ended for s in started) and list(alive) == ["killed", "layout"]
    assert read_json(tmp_path / "out.json") == {
        "servers": {"tokens_per_s_one": 100.0, "saturated_one": 200.0, "tokens_per_s_two": 200.0,
                    "saturated_two": 400.0, "speedup_of_two": 2.0},
        "layout": {"value": 1},
    }  # fmt: skip


def test_servers_that_end_slowly_do_not_outlive_the_benchmark(tmp_path: Path) -> None:
    """`timeout` kills us 30 s after it told us to stop: four servers must be gone by then, whatever they do."""
    ready = tmp_path / "ready"
    code = f"import signal, time; signal.signal(15, signal.SIG_IGN); open({str(ready)!r}, 'w').close(); time.sleep(90)"
    stubborn = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while not ready.exists():
        time.sleep(0.01)
    begin = time.monotonic()
    with pair(tmp_path, 0) as servers:
        servers.running.append((stubborn, "http://s:1"))
    assert stubborn.poll() is not None and time.monotonic() - begin < 5


def test_a_part_starts_only_the_servers_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Server]
) -> None:
    monkeypatch.setattr(bench_two_gpus.subprocess, "run", rollouts)
    monkeypatch.setitem(bench_two_gpus.PARTS, "layout", lambda *_: None)
    bench_two_gpus.run(arguments(tmp_path), ["layout"], tmp_path, {})
    assert [s.log.stem for s in started] == ["server_real0"]
    started.clear()
    bench_two_gpus.run(arguments(tmp_path), ["servers"], tmp_path, {})
    assert [s.log.stem for s in started] == ["server_compared0", "server_compared1"] and all(s.ended for s in started)


def test_the_server_that_was_killed_returns_on_its_own_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Server]
) -> None:
    """Killed in the third iteration, back, used for two more; the counts come from the run's own files."""
    folder, waits = tmp_path / "killed", list[Any]()
    args, saved = arguments(tmp_path), list[dict[str, Any]]()

    def train(args: Any, names: list[str], urls: str, folder: Path, iterations: int) -> subprocess.Popen[str]:
        assert urls == "http://s:1,http://s:2" and iterations == SIZES["gpu"].endless
        (folder / "run").mkdir(parents=True)
        (folder / "run/metrics.jsonl").write_text(
            "".join(json.dumps(row(k, 2.0 * k, episodes=512.0)) + "\n" for k in range(1, 6))
        )
        events = [("server lost", 2), ("server back", 2), ("loaded", 2), ("loaded", 1)]
        lines = [json.dumps({"event": what, "server": f"http://s:{k}"}) for what, k in events]
        (folder / "run/events.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "train.log").write_text("")
        told = f"import sys; sys.exit({INTERRUPTED})"
        return subprocess.Popen([sys.executable, "-c", told], text=True, start_new_session=True)

    monkeypatch.setattr(bench_two_gpus, "train", train)
    monkeypatch.setattr(bench_two_gpus, "_wait_for", lambda *_: waits.append([s.ended for s in started]))
    bench_two_gpus.killed(args, tmp_path, pair(tmp_path, 2), saved.append)
    assert waits == [[False, False], [False, True, False], [False, True, False]]
    assert started[2].port == 2 and started[2].env == started[1].env
    [found] = saved
    assert (found["lost"], found["back"], found["loaded_after_return"]) == (1, 1, 1)
    assert found["iterations_in_order"] and found["episodes_beside_whole_groups"] == 0 and folder.exists()


def bench_rollouts_options(command: list[str]) -> dict[str, str]:
    """Flags with their values, all of which ``bench_rollouts.py`` knows."""
    from benchmarks.bench_rollouts import Size

    text = (ROOT / command[1]).read_text()
    options = dict(zip(command[2::2], command[3::2], strict=True))
    fields = {f"--{field.name}" for field in dataclasses.fields(Size)}
    assert all(f'"{flag}"' in text or flag in fields for flag in options)
    return options
