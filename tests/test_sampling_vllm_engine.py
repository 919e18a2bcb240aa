"""The vLLM engine against a scripted server: what it sends, what it refuses, and every way a server can fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer

from game_registry import AgentError
from pipeline.files import InputError, ServerError
from pipeline.ports import free_port
from train.engine import SamplingParams
from train.vllm_engine import VllmEngine
from train.vllm_pool import PoolTimes, times_from_env
from train.vllm_protocol import count_engines, own_name, parse_base_urls

FAST = PoolTimes(request_s=1.0, probe_every_s=0.05, probe_timeout_s=0.3, patience_s=0.4, backoff_s=0.01)
PARAMS = SamplingParams(max_new_tokens=8)


@contextlib.asynccontextmanager
async def open_engine(*servers: ScriptedServer, **options: Any) -> AsyncIterator[VllmEngine]:
    options = {"times": FAST, **options}
    engine = VllmEngine(",".join(s.url for s in servers), "scripted", [2], **options)
    try:
        yield engine
    finally:
        await engine.close()


def adapter_folder(root: Path, name: str = "adapter") -> str:
    folder = root / name
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return str(folder)


async def eventually(condition: Any, limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


# ------------------------------------------------------------------ the request and the answer


async def test_token_ids_pass_verbatim(scripted_server: ScriptedServer) -> None:
    scripted_server.completion = lambda ids, body: [7, 8, 2]
    scripted_server.logprob = lambda token, body: -token / 10
    async with open_engine(scripted_server) as engine:
        sample = await engine.sample([5, 6], PARAMS)
        assert sample.token_ids == (7, 8, 2) and sample.finish_reason == "stop"
        assert sample.logprobs == pytest.approx((-0.7, -0.8, -0.2))
        assert engine.n_sampled_tokens == 3 and engine.max_model_len == 2048
    body = scripted_server.calls("/v1/completions")[0]
    assert body["prompt"] == [5, 6]


async def test_whole_distribution_is_sampled_and_only_our_stops_end_a_turn(scripted_server: ScriptedServer) -> None:
    """A server fills absent sampling fields from generation_config.json (Qwen3: top-p 0.8), so each is sent by name."""
    async with open_engine(scripted_server) as engine:
        await engine.sample([5], SamplingParams(4, 1.0, ("</done>",), seed=11))
    body = scripted_server.calls("/v1/completions")[0]
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
    assert body["logprobs"] == 0 and body["return_token_ids"] is True
    assert body["ignore_eos"] is True and body["stop_token_ids"] == [2]
    assert body["stop"] == ["</done>"] and body["seed"] == 11 and body["temperature"] == 1.0


async def test_cut_turn_is_length(scripted_server: ScriptedServer) -> None:
    scripted_server.completion = lambda ids, body: [9] * 100
    async with open_engine(scripted_server) as engine:
        sample = await engine.sample([5], PARAMS)
    assert sample.finish_reason == "length" and len(sample.token_ids) == 8


async def test_turn_is_fitted_into_the_server_context(scripted_server: ScriptedServer) -> None:
    scripted_server.max_model_len = 12
    scripted_server.completion = lambda ids, body: [9] * 100
    async with open_engine(scripted_server) as engine:
        sample = await engine.sample([5] * 10, PARAMS)
        assert len(sample.token_ids) == 2 and sample.finish_reason == "length"
        with pytest.raises(AgentError, match="server context 12") as caught:
            await engine.sample([5] * 12, PARAMS)
        assert caught.value.kind == "context"


def change_choice(**changes: Any) -> Any:
    def edit(response: dict[str, Any]) -> dict[str, Any]:
        response["choices"][0].update(changes)
        return response

    return edit


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"token_ids": None}, "return_token_ids"),
        ({"token_ids": ["a"]}, "return_token_ids"),
        ({"prompt_token_ids": None}, "return_token_ids"),
        ({"prompt_token_ids": [5, 7]}, "another prompt"),
        ({"token_ids": []}, "expected 1 to 8"),
        ({"token_ids": [3] * 9}, "expected 1 to 8"),
        ({"logprobs": None}, "expected 2 numbers"),
        ({"logprobs": {"token_logprobs": [-0.5]}}, "expected 2 numbers"),
        ({"logprobs": {"token_logprobs": [-0.5, math.nan]}}, "finite"),
        ({"logprobs": {"token_logprobs": [-0.5, None]}}, "finite"),
        ({"logprobs": {"token_logprobs": [-0.5, 0.7]}}, "<= 0"),
        ({"finish_reason": "length"}, "--generation-config vllm"),
        ({"token_ids": [7, 9]}, "stopped at token 9"),
    ],
)
async def test_nonsense_is_a_typed_error(
    scripted_server: ScriptedServer, changes: dict[str, Any], expected: str
) -> None:
    scripted_server.completion = lambda ids, body: [7, 2]
    scripted_server.edit = change_choice(**changes)
    async with open_engine(scripted_server) as engine:
        with pytest.raises(AgentError) as caught:
            await engine.sample([5, 6], PARAMS)
    assert caught.value.kind == "nonsense"
    assert expected in caught.value.detail
    assert len(scripted_server.calls("/v1/completions")) == 1, "asking again for the same nonsense is a waste"


@pytest.mark.parametrize("answer", [{}, {"choices": []}, [1, 2]])
async def test_wrong_shape_is_tried_again_then_typed(scripted_server: ScriptedServer, answer: Any) -> None:
    scripted_server.edit = lambda response: answer
    async with open_engine(scripted_server) as engine:
        with pytest.raises(AgentError) as caught:
            await engine.sample([5], PARAMS)
    assert caught.value.kind == "nonsense" and len(scripted_server.calls("/v1/completions")) > 1


# ------------------------------------------------------------------ failures of one server


@pytest.mark.parametrize("mode", ["500", "503", "garbage", "die_midway", "refuse"])
async def test_a_passing_fault_is_ridden_out(scripted_server: ScriptedServer, mode: str) -> None:
    async with open_engine(scripted_server) as engine:
        await engine.sample([5], PARAMS)
        scripted_server.fail, scripted_server.fail_times = mode, 2
        assert (await engine.sample([5], PARAMS)).token_ids == (2,)
        assert engine.n_retries + engine.pool.n_deaths > 0


@pytest.mark.parametrize(
    ("mode", "kind"), [("500", "server"), ("garbage", "nonsense"), ("die_midway", "server"), ("hang", "timeout")]
)
async def test_a_lasting_fault_is_a_typed_error(scripted_server: ScriptedServer, mode: str, kind: str) -> None:
    scripted_server.fail = mode
    async with open_engine(scripted_server, times=dataclasses.replace(FAST, request_s=0.2)) as engine:
        async with asyncio.timeout(10):
            with pytest.raises(AgentError) as caught:
                await engine.sample([5], PARAMS)
        assert caught.value.kind == kind
    assert "tries" in caught.value.detail and scripted_server.url in caught.value.detail


async def test_absent_server_is_named_with_a_remedy() -> None:
    engine = VllmEngine(f"http://127.0.0.1:{free_port()}", "scripted", [2], times=FAST)
    with pytest.raises(ServerError, match=r"no vLLM server answers.*start it"):
        await engine.start()
    with pytest.raises(AgentError) as caught:
        await engine.sample([5], PARAMS)
    assert caught.value.kind == "server"
    await engine.close()


async def test_server_that_dies_for_good_ends_within_the_patience(scripted_server: ScriptedServer) -> None:
    scripted_server.delay_s = 30
    async with open_engine(scripted_server) as engine:
        tasks = [asyncio.create_task(engine.sample([5, i], PARAMS)) for i in range(5)]
        await eventually(lambda: scripted_server.in_flight == 5)
        await asyncio.to_thread(scripted_server.stop)
        async with asyncio.timeout(5):
            results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [AgentError] * 5
    assert all(isinstance(r, AgentError) and r.kind == "server" for r in results)


async def test_server_that_returns_finishes_the_work_with_its_adapter(
    scripted_server: ScriptedServer, tmp_path: Path
) -> None:
    folder = adapter_folder(tmp_path)
    async with open_engine(scripted_server, times=dataclasses.replace(FAST, patience_s=10, request_s=20)) as engine:
        await engine.load_adapter("a@v1", folder)
        scripted_server.delay_s = 30
        task = asyncio.create_task(engine.sample([5], PARAMS, "a@v1"))
        await eventually(lambda: scripted_server.in_flight == 1)
        await asyncio.to_thread(scripted_server.stop)
        await eventually(lambda: not engine.pool.alive)
        scripted_server.delay_s = 0
        await asyncio.to_thread(scripted_server.start)
        async with asyncio.timeout(5):
            assert (await task).token_ids == (2,)
    assert scripted_server.adapters == {"a@v1": folder}


async def test_quick_restart_without_our_adapter_is_noticed(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    async with open_engine(scripted_server, times=dataclasses.replace(FAST, probe_every_s=60)) as engine:
        await engine.load_adapter("a@v1", adapter_folder(tmp_path))
        scripted_server.adapters.clear()
        assert (await engine.sample([5], PARAMS, "a@v1")).token_ids == (2,)


async def test_cancelled_caller_frees_the_request(scripted_server: ScriptedServer) -> None:
    scripted_server.delay_s = 30
    async with open_engine(scripted_server) as engine:
        task = asyncio.create_task(engine.sample([5], PARAMS))
        await eventually(lambda: scripted_server.in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: scripted_server.in_flight == 0)
        assert engine.pool.alive, "a cancelled episode says nothing about the server"


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_refused_key_says_what_to_set(scripted_server: ScriptedServer, key: str | None) -> None:
    scripted_server.api_key = "secret"
    async with open_engine(scripted_server, api_key=key) as engine:
        with pytest.raises(InputError, match="VLLM_API_KEY"):
            await engine.start()
    async with open_engine(scripted_server, api_key="secret") as engine:
        await engine.start()


async def test_unserved_model_lists_what_is_served(scripted_server: ScriptedServer) -> None:
    engine = VllmEngine(scripted_server.url, "other", [2], times=FAST)
    with pytest.raises(InputError, match="'other' is not served; the server has scripted"):
        await engine.start()
    await engine.close()


async def test_model_folder_is_recognised_by_the_root_it_is_served_from(
    scripted_server: ScriptedServer, tmp_path: Path
) -> None:
    scripted_server.model = str(tmp_path)
    engine = VllmEngine(scripted_server.url, str(tmp_path) + "/", [2], times=FAST)
    await engine.start()
    assert engine.model == str(tmp_path)
    await engine.close()


# ------------------------------------------------------------------ several servers


async def test_load_is_spread_and_all_servers_work(scripted_server: ScriptedServer) -> None:
    with ScriptedServer(delay_s=0.05) as other:
        scripted_server.delay_s = 0.05
        async with open_engine(scripted_server, other) as engine:
            await asyncio.gather(*(engine.sample([5, i], PARAMS) for i in range(60)))
        counts = [len(s.calls("/v1/completions")) for s in (scripted_server, other)]
    assert sum(counts) == 60 and min(counts) >= 25


async def test_later_turns_go_where_the_prefix_is(scripted_server: ScriptedServer) -> None:
    with ScriptedServer() as other:
        async with open_engine(scripted_server, other) as engine:
            for episode in range(6):
                prompt = [episode + 10] * 70
                for _ in range(4):
                    prompt = [*prompt, *(await engine.sample(prompt, PARAMS)).token_ids, *[99] * 70]
        seen = [{body["prompt"][0] for body in s.calls("/v1/completions")} for s in (scripted_server, other)]
    assert not seen[0] & seen[1], "an episode must not move between idle servers"


async def test_work_of_a_dead_server_goes_to_the_others(scripted_server: ScriptedServer) -> None:
    with ScriptedServer(delay_s=30) as doomed:
        async with open_engine(scripted_server, doomed) as engine:
            tasks = [asyncio.create_task(engine.sample([5, i], PARAMS)) for i in range(40)]
            await eventually(lambda: doomed.in_flight > 0)
            await asyncio.to_thread(doomed.stop)
            async with asyncio.timeout(5):
                samples = await asyncio.gather(*tasks)
            assert len(samples) == 40 and [s.url for s in engine.pool.alive] == [scripted_server.url]
            await asyncio.to_thread(doomed.start)
            await eventually(lambda: len(engine.pool.alive) == 2)


async def test_hung_server_is_dropped_by_its_probe_long_before_the_deadline(scripted_server: ScriptedServer) -> None:
    with ScriptedServer() as hung:
        async with open_engine(scripted_server, hung, times=dataclasses.replace(FAST, request_s=60)) as engine:
            await engine.start()
            hung.fail, hung.fail_paths = "hang", ("/health", "/v1/completions")
            async with asyncio.timeout(10):
                samples = await asyncio.gather(*(engine.sample([5, i], PARAMS) for i in range(20)))
            assert len(samples) == 20 and engine.pool.n_redispatched > 0


async def test_256_episodes_in_flight_at_once(scripted_server: ScriptedServer) -> None:
    scripted_server.delay_s = 600  # nobody is answered, so all must be waiting at once however slow the machine is
    times = dataclasses.replace(FAST, request_s=600, probe_every_s=600)
    async with open_engine(scripted_server, times=times) as engine:
        tasks = [asyncio.create_task(engine.sample([5, i], PARAMS)) for i in range(256)]
        await eventually(lambda: scripted_server.in_flight == 256, limit_s=60)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ------------------------------------------------------------------ log-probs at the sampling temperature


async def test_raw_logprobs_are_refused_at_another_temperature(scripted_server: ScriptedServer) -> None:
    async with open_engine(scripted_server) as engine:
        for temperature in (1.0, 0.0):
            await engine.sample([5], SamplingParams(4, temperature))
        with pytest.raises(InputError, match="--logprobs-mode processed_logprobs"):
            await engine.sample([5], SamplingParams(4, 0.7))


async def test_processed_logprobs_are_recognised_once_per_server(scripted_server: ScriptedServer) -> None:
    scripted_server.processed_logprobs = True
    async with open_engine(scripted_server) as engine:
        for _ in range(3):
            await engine.sample([5], SamplingParams(4, 0.7))
    assert len(scripted_server.calls("/v1/completions")) == 3 + 3


# ------------------------------------------------------------------ adapters


async def test_adapter_reaches_every_server_and_is_a_model_name(
    scripted_server: ScriptedServer, tmp_path: Path
) -> None:
    folder = adapter_folder(tmp_path)
    with ScriptedServer() as other:
        async with open_engine(scripted_server, other) as engine:
            await engine.load_adapter("lookup@v3", folder)
            assert scripted_server.adapters == other.adapters == {"lookup@v3": folder}
            await engine.sample([5], PARAMS, "lookup@v3")
            await engine.unload_adapter("lookup@v3")
            assert scripted_server.adapters == other.adapters == {}
            with pytest.raises(AgentError, match="not loaded"):
                await engine.sample([5], PARAMS, "lookup@v3")
    sent = [*scripted_server.calls("/v1/completions"), *other.calls("/v1/completions")]
    assert [body["model"] for body in sent] == ["lookup@v3"]


async def test_unload_waits_for_turns_in_flight(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    async with open_engine(scripted_server) as engine:
        await engine.load_adapter("a@v1", adapter_folder(tmp_path))
        scripted_server.delay_s = 0.3
        turn = asyncio.create_task(engine.sample([5], PARAMS, "a@v1"))
        await eventually(lambda: scripted_server.in_flight == 1)
        unload = asyncio.create_task(engine.unload_adapter("a@v1"))
        await asyncio.sleep(0.1)
        assert "a@v1" in scripted_server.adapters and not unload.done()
        assert (await turn).token_ids == (2,)
        await unload
        assert scripted_server.adapters == {}


async def test_a_name_is_never_reused_for_other_weights(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    async with open_engine(scripted_server) as engine:
        await engine.load_adapter("a@v1", adapter_folder(tmp_path))
        with pytest.raises(InputError, match="in use"):
            await engine.load_adapter("a@v1", adapter_folder(tmp_path, "second"))


async def test_name_left_by_an_earlier_run_is_replaced_and_its_cache_not_shared(
    scripted_server: ScriptedServer, tmp_path: Path
) -> None:
    salts, folder = [], adapter_folder(tmp_path, "run")
    for _ in range(2):
        async with open_engine(scripted_server) as engine:  # the first run is killed: nothing is unloaded
            await engine.load_adapter("a@v1", folder)
            await engine.sample([5], PARAMS, "a@v1")
        salts.append(scripted_server.calls("/v1/completions")[-1]["cache_salt"])
    assert len(scripted_server.calls("/v1/unload_lora_adapter")) == 1
    assert salts[0] != salts[1], "keys and values cached under the old weights would be used for the new"


async def test_the_name_of_another_run_is_left_to_it(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    own = adapter_folder(tmp_path, "own")
    scripted_server.adapters["a@v1"] = adapter_folder(tmp_path, "their")
    async with open_engine(scripted_server) as engine:
        their = dict(scripted_server.adapters)
        await engine.load_adapter("a@v1", own)
        assert scripted_server.adapters == their | {own_name("a@v1", own): own}
        await engine.sample([5], PARAMS, "a@v1")
        assert scripted_server.calls("/v1/completions")[-1]["model"] == own_name("a@v1", own)
        await engine.score(engine.pool.servers[0], (5, 6, 7), [1, 2], "a@v1")
        assert {body["model"] for body in scripted_server.calls("/v1/completions")} == {own_name("a@v1", own)}
        await engine.unload_adapter("a@v1")
    assert scripted_server.adapters == their


async def test_run_time_lora_switched_off_is_explained(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    scripted_server.lora_enabled = False
    async with open_engine(scripted_server) as engine:
        with pytest.raises(InputError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            await engine.load_adapter("a@v1", adapter_folder(tmp_path))
        with pytest.raises(AgentError, match="not loaded"):
            await engine.sample([5], PARAMS, "a@v1")


async def test_data_parallel_server_is_refused_with_the_remedy(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    scripted_server.engines = 4
    async with open_engine(scripted_server) as engine:
        with pytest.raises(InputError, match=r"4 data-parallel engines.*VLLM_BASE_URLS"):
            await engine.load_adapter("a@v1", adapter_folder(tmp_path))


async def test_folder_without_adapter_is_refused_before_any_request(
    scripted_server: ScriptedServer, tmp_path: Path
) -> None:
    async with open_engine(scripted_server) as engine:
        with pytest.raises(InputError, match=r"adapter_config\.json"):
            await engine.load_adapter("a@v1", str(tmp_path))
    assert scripted_server.requests == []


async def test_load_survives_one_dead_server(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    with ScriptedServer() as other:
        async with open_engine(scripted_server, other) as engine:
            await engine.start()
            await asyncio.to_thread(other.stop)
            await engine.load_adapter("a@v1", adapter_folder(tmp_path))
            assert scripted_server.adapters and [s.url for s in engine.pool.alive] == [scripted_server.url]


# ------------------------------------------------------------------ small parts


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("http://a:1", ("http://a:1",)),
        ("http://a:1/v1, http://b:2/v1/ ,http://a:1/", ("http://a:1", "http://b:2")),
        ("https://x/proxy/v1", ("https://x/proxy",)),
    ],
)
def test_base_urls(text: str, urls: tuple[str, ...]) -> None:
    assert parse_base_urls(text) == urls


@pytest.mark.parametrize("text", ["", " , ", "localhost:8000", "ftp://a", "http://"])
def test_bad_base_urls(text: str) -> None:
    with pytest.raises(InputError, match="expected http"):
        parse_base_urls(text)


def test_request_deadline_comes_from_the_environment() -> None:
    assert times_from_env({}).request_s == PoolTimes().request_s
    assert times_from_env({"VLLM_TIMEOUT_S": "12.5"}).request_s == 12.5
    for text in ("x", "0", "-1", "nan", "inf"):
        with pytest.raises(InputError, match="VLLM_TIMEOUT_S"):
            times_from_env({"VLLM_TIMEOUT_S": text})


def test_engines_behind_one_url_are_counted() -> None:
    rows = 'vllm:num_requests_running{engine="%d",model_name="m"} 0.0'
    assert count_engines("\n".join(rows % i for i in range(3))) == 3
    assert count_engines(rows % 0) == 1
    assert count_engines("nothing_here 1") is None


def test_bodies_are_plain_json(scripted_server: ScriptedServer) -> None:
    from train.vllm_protocol import completion_request

    body = completion_request("m", (1, 2), PARAMS, (2,), "salt")
    assert json.loads(json.dumps(body)) == body
