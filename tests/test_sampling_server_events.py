"""When a server dies, the message and the run log say what it was doing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from game_registry import AgentError
from train.engine import SamplingParams
from train.run_log import RunLog
from train.vllm_engine import VllmEngine
from train.vllm_pool import HISTORY, PoolTimes

FAST = PoolTimes(request_s=5.0, probe_every_s=0.05, probe_timeout_s=0.3, patience_s=0.2, backoff_s=0.01)


def folder(tmp_path: Path, name: str) -> str:
    path = tmp_path / name
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    return str(path)


def test_a_dead_servers_last_changes_are_told(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []

    async def run() -> None:
        engine = VllmEngine(scripted_server.url, "scripted", [2], times=FAST)
        engine.pool.on_event = events.append
        try:
            for k in range(HISTORY):
                await engine.load_adapter(f"a@v{k}", folder(tmp_path, f"v{k}"))
            await engine.unload_adapter("a@v0")
            scripted_server.delay_s = 30.0
            turns = [
                asyncio.create_task(engine.sample([5, 6], SamplingParams(4), f"a@v{HISTORY - 1}")) for _ in range(3)
            ]
            while scripted_server.in_flight < 3:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(scripted_server.stop)
            results = await asyncio.gather(*turns, return_exceptions=True)
            assert all(isinstance(r, AgentError) for r in results)
            last = f"loaded a@v{HISTORY - 1} "
            for error in map(str, results):
                assert "3 requests in flight" in error and last in error and "unload a@v0 " in error, error
                assert error.count(" s before") == HISTORY, "older changes explain nothing"
            scripted_server.delay_s = 0.0
            await asyncio.to_thread(scripted_server.start)
            async with asyncio.timeout(5):
                while not engine.pool.alive:
                    await asyncio.sleep(0.02)
        finally:
            await engine.close()

    asyncio.run(run())
    kinds = [e["event"] for e in events]
    assert kinds[: 2 * HISTORY + 1] == ["load", "loaded"] * HISTORY + ["unload"]
    assert kinds.count("server lost") == 1 and kinds.count("server back") == 1
    assert {e["server"] for e in events} == {scripted_server.url}
    lost = next(e for e in events if e["event"] == "server lost")
    assert "3 requests in flight" in lost["why"]
    unload = next(e for e in events if e["event"] == "unload")
    assert unload["adapter"] == "a@v0" and unload["in_flight"] == 0
    after = kinds[kinds.index("server lost") :]
    assert after.count("loaded") == HISTORY - 1, "every adapter of the run is loaded again before it is back"


def test_events_are_written_and_deaths_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, {})
    assert not (tmp_path / "events.jsonl").exists()
    log.event({"event": "loaded", "server": "http://a:1", "adapter": "x@v1"})
    log.event({"event": "server lost", "server": "http://a:1", "why": "no answer; 3 requests in flight"})
    log.close()
    log.event({"event": "server back", "server": "http://a:1"})  # too late to matter
    records = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [r["event"] for r in records] == ["loaded", "server lost"] and records[0]["time"] > 1e9
    err = capsys.readouterr().err
    assert err == "server lost: http://a:1 (no answer; 3 requests in flight)\n"
    again = RunLog(tmp_path, {})
    again.event({"event": "server back", "server": "http://a:1"})
    again.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 3, "a resumed run appends"
