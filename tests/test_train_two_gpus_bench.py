"""The two-GPU benchmark: what it reads from a run, and that a run which ends early is told as such."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from pipeline.files import ServerError, read_json

sys.path.insert(0, str(ROOT))

from benchmarks import bench_two_gpus
from benchmarks.bench_two_gpus import INTERRUPTED, SIZES, GpuMeter, _wait_for, finish, summary
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
    assert len(finish(process(tmp_path, f"import sys; sys.exit({INTERRUPTED})"), tmp_path, 30)) == 1
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
    assert ("0.8" in SIZES[name].server) == (name == "gpu"), "two servers beside a trainer take another share"


def arguments(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        size="gpu", model=tmp_path / "model", out=tmp_path / "out.json", server_start_s=9.0, logs=tmp_path / "logs"
    )


def test_layout_measures_one_and_four_capabilities_on_one_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first result is on disk before the second run begins."""
    began: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def served(model: Path, flags: list[str], log: Path, limit_s: float, env: dict[str, str]) -> Iterator[str]:
        began.append({"server": env, "log": log})
        yield "http://server"

    def train(args: Any, names: list[str], url: str, folder: Path) -> subprocess.Popen[str]:
        began.append({"names": names, "url": url, "written": read_json(args.out) if args.out.exists() else None})
        lines = [json.dumps(row(k, 5.0 * k)) for k in (1, 2, 3) for _ in names]
        (folder / "run").mkdir(parents=True)
        (folder / "run/metrics.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "train.log").write_text("")
        return subprocess.Popen([sys.executable, "-c", "pass"], text=True, start_new_session=True)

    monkeypatch.setattr(bench_two_gpus, "served", served)
    monkeypatch.setattr(bench_two_gpus, "train", train)
    record: dict[str, Any] = {}
    bench_two_gpus.layout(arguments(tmp_path), tmp_path, record)
    assert began[0] == {"server": {"CUDA_VISIBLE_DEVICES": "0"}, "log": tmp_path / "server.log"}
    assert [len(entry["names"]) for entry in began[1:]] == [1, 4] and began[1]["url"] == "http://server"
    assert began[1]["written"] is None and list(began[2]["written"]["capabilities"]) == ["1"]
    found = read_json(tmp_path / "out.json")["capabilities"]
    assert found["4"]["iterations"] == 12 and found["1"]["tokens_per_s"] == 10.0 and "gpu_idle_shares" in found["4"]


class Server:
    def __init__(self, log: Path, env: dict[str, str]) -> None:
        self.log, self.env, self.ended = log, env, False


def test_two_servers_are_compared_with_one_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Server] = []

    def launch(model: Path, flags: list[str], log: Path, env: dict[str, str]) -> tuple[Server, str]:
        assert "0.5" in flags and "0.8" not in flags, "two servers and a trainer: half a GPU each"
        started.append(Server(log, env))
        return started[-1], f"http://s{len(started)}"

    def run(command: list[str], **more: Any) -> None:
        options = bench_rollouts_options(command)
        rate = 100.0 * len(options["--base-url"].split(","))
        Path(options["--json-output"]).write_text(json.dumps({"tokens_per_s": rate}))

    monkeypatch.setattr(bench_two_gpus, "launch", launch)
    monkeypatch.setattr(bench_two_gpus, "wait_until_healthy", lambda *_: None)
    monkeypatch.setattr(bench_two_gpus, "end", lambda server: setattr(server, "ended", True))
    monkeypatch.setattr(bench_two_gpus.subprocess, "run", run)
    record: dict[str, Any] = {}
    bench_two_gpus.servers(arguments(tmp_path), tmp_path, record)
    assert [s.env["CUDA_VISIBLE_DEVICES"] for s in started] == ["0", "1"] and all(s.ended for s in started)
    assert read_json(tmp_path / "out.json") == {
        "tokens_per_s_one": 100.0, "tokens_per_s_two": 200.0, "speedup_of_two": 2.0,
    }  # fmt: skip


def bench_rollouts_options(command: list[str]) -> dict[str, str]:
    """Flags with their values, all of which ``bench_rollouts.py`` knows."""
    from benchmarks.bench_rollouts import Size

    text = (ROOT / command[1]).read_text()
    options = dict(zip(command[2::2], command[3::2], strict=True))
    fields = {f"--{field.name}" for field in dataclasses.fields(Size)}
    assert all(f'"{flag}"' in text or flag in fields for flag in options)
    return options
