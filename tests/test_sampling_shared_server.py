"""Two runs that train the same capability on one server: faults of one never touch the adapters of the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from scripted_server import ScriptedServer

from pipeline.files import ServerError
from train.delivery import AdapterDelivery
from train.engine import SamplingParams
from train.vllm_engine import VllmEngine
from train.vllm_pool import PoolTimes
from train.vllm_protocol import own_name

FAST = PoolTimes(request_s=2.0, probe_every_s=0.05, probe_timeout_s=0.3, patience_s=1.0, backoff_s=0.01)
LOAD, MODELS = ("/v1/load_lora_adapter",), ("/v1/models",)
PARAMS = SamplingParams(4)


class Two:
    """Deliveries of two runs, ``theirs`` (which holds ``x@v1``) and ``mine``, and their folders."""

    def __init__(self, server: ScriptedServer, tmp_path: Path) -> None:
        self.server = server
        self.engines = [VllmEngine(server.url, "scripted", [2], times=FAST) for _ in range(2)]
        self.theirs, self.mine = map(AdapterDelivery, self.engines)
        self.folders = [self._folder(tmp_path / run) for run in ("their", "my")]
        self.tagged = own_name("x@v1", self.folders[1])

    @staticmethod
    def _folder(run: Path) -> str:
        folder = run / "adapters" / "x@v1"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        return str(folder)

    def run(self, steps: Callable[[], Awaitable[Any]]) -> None:
        async def whole() -> None:
            try:
                await self.theirs.deliver("x", 1, self.folders[0])
                await self.engines[1].start()
                await steps()
            finally:
                self.server.fail = None
                for engine in self.engines:
                    await engine.close()

        asyncio.run(whole())

    async def names_asked(self, engine: int) -> str:
        await self.engines[engine].sample([1], PARAMS, "x@v1")
        return str(self.server.calls("/v1/completions")[-1]["model"])


@pytest.fixture
def two(scripted_server: ScriptedServer, tmp_path: Path) -> Two:
    return Two(scripted_server, tmp_path)


def test_a_load_that_is_cancelled_takes_nothing_of_others_off(two: Two) -> None:
    async def steps() -> None:
        two.server.fail, two.server.fail_paths = "hang", LOAD
        task = asyncio.create_task(two.mine.deliver("x", 1, two.folders[1]))
        await asyncio.sleep(0.3)
        two.server.fail = None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert two.server.adapters == {"x@v1": two.folders[0]}
        assert await two.names_asked(0) == "x@v1"

    two.run(steps)


def test_a_server_that_comes_back_with_the_adapter_of_another_run(two: Two) -> None:
    """It was restarted, and the other run was faster."""

    async def steps() -> None:
        two.server.adapters.clear()
        await two.mine.deliver("x", 1, two.folders[1])
        assert two.server.adapters == {"x@v1": two.folders[1]}
        engine = two.engines[0]
        engine.pool.drop(engine.pool.servers[0], "restarted")
        await asyncio.sleep(0.5)
        assert engine.pool.alive, engine.pool.servers[0].why_dead
        theirs = own_name("x@v1", two.folders[0])
        assert two.server.adapters == {"x@v1": two.folders[1], theirs: two.folders[0]}
        assert (await two.names_asked(0), await two.names_asked(1)) == (theirs, "x@v1")
        await two.theirs.close()
        assert two.server.adapters == {"x@v1": two.folders[1]}

    two.run(steps)


def test_a_forgotten_adapter_is_loaded_under_the_name_that_is_left(two: Two) -> None:
    async def steps() -> None:
        await two.mine.deliver("x", 1, two.folders[1])
        del two.server.adapters[two.tagged]
        assert await two.names_asked(1) == two.tagged
        assert two.server.adapters == {"x@v1": two.folders[0], two.tagged: two.folders[1]}

    two.run(steps)


@pytest.mark.parametrize("turns", [2, 24])
def test_many_turns_reload_a_forgotten_adapter_once(two: Two, turns: int) -> None:
    async def steps() -> None:
        await two.mine.deliver("x", 1, two.folders[1])
        two.server.adapters.clear()
        loads = len(two.server.calls(LOAD[0]))
        samples = await asyncio.gather(*(two.engines[1].sample([1], PARAMS, "x@v1") for _ in range(turns)))
        assert all(sample.token_ids == (2,) for sample in samples)
        assert len(two.server.calls(LOAD[0])) == loads + 1

    two.run(steps)


@pytest.mark.parametrize("fail", ["500", "garbage", "refuse"])
def test_a_server_that_does_not_tell_what_it_has_is_left_alone(two: Two, fail: str) -> None:
    async def steps() -> None:
        two.server.fail, two.server.fail_paths = fail, MODELS
        with pytest.raises(ServerError, match="no server is alive"):
            await two.mine.deliver("x", 1, two.folders[1])
        assert two.server.adapters == {"x@v1": two.folders[0]}

    two.run(steps)


def test_what_an_earlier_try_left_under_the_own_name_is_loaded_anew(two: Two) -> None:
    async def steps() -> None:
        two.server.adapters[two.tagged] = two.folders[1]
        await two.mine.deliver("x", 1, two.folders[1])
        assert two.server.adapters == {"x@v1": two.folders[0], two.tagged: two.folders[1]}
        assert two.server.calls("/v1/unload_lora_adapter") == [{"lora_name": two.tagged}]

    two.run(steps)


class NoFolders(ScriptedServer):
    """``/v1/models`` does not say where adapters come from."""

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": self.model, "root": self.model, "parent": None, "max_model_len": 2048}
        rows = [{"id": name, "root": None, "parent": self.model} for name in self.adapters]
        return web.json_response({"object": "list", "data": [base, *rows]})


def test_where_folders_are_not_told_the_name_is_taken_for_ours(tmp_path: Path) -> None:
    folder = Two._folder(tmp_path / "my")
    with NoFolders() as server:
        for _ in range(2):  # killed and resumed

            async def once() -> None:
                engine = VllmEngine(server.url, "scripted", [2], times=FAST)
                try:
                    await AdapterDelivery(engine).deliver("x", 1, folder)
                finally:
                    await engine.close()

            asyncio.run(once())
            assert server.adapters == {"x@v1": folder}
