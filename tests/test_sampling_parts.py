"""Small parts of sampling: prefix routing, engine flags, adapter files, the user simulator."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_game
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, right_answer
from scripted_server import ScriptedServer

from game_registry import AgentError, Failed, GameSpec
from pipeline.files import InputError
from pipeline.ports import free_port
from train.adapter_folder import as_folders, parse_adapters, unpack_file
from train.chat import ChatCodec
from train.engines import EngineOptions, OpenEngine, add_engine_flags, attach_adapter, engine_options, open_engine
from train.episode import Episode, EpisodeParams
from train.prefix_routing import BLOCK, PrefixIndex, pick_server
from train.rollout import Job, collect
from train.user_llm import UserLLM, add_user_llm_flags, user_llm_from

# ------------------------------------------------------------------ prefix routing


def test_depth_is_the_common_prefix_in_blocks() -> None:
    index = PrefixIndex()
    prompt = list(range(BLOCK * 3 + 5))
    index.record(prompt, "", 1)
    assert index.depth(prompt, "", 2) == [0, 3 * BLOCK]
    assert index.depth([*prompt[: BLOCK + 3], -1] * 2, "", 2) == [0, BLOCK]
    assert index.depth(prompt[: BLOCK - 1], "", 2) == [0, 0]
    assert index.depth(prompt, "other adapter", 2) == [0, 0], "keys and values belong to one adapter"
    index.record(prompt[: BLOCK * 2], "", 0)
    assert index.depth(prompt, "", 2) == [2 * BLOCK, 3 * BLOCK]
    index.forget(1)
    assert index.depth(prompt, "", 2) == [2 * BLOCK, 0]


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=6)), max_size=20))
@settings(max_examples=60, deadline=None)
def test_depth_agrees_with_comparing_prompts(history: list[tuple[int, list[int]]]) -> None:
    index = PrefixIndex()
    blocks = {0: [7] * BLOCK, 1: [8] * BLOCK}
    sent: list[tuple[int, list[int]]] = []
    for server, shape in history:
        prompt = [token for b in shape for token in blocks[b]]
        expected = [0] * 4
        for other, old in sent:
            same = next(
                (i for i, (a, b) in enumerate(zip(old, prompt, strict=False)) if a != b), min(len(old), len(prompt))
            )
            expected[other] = max(expected[other], same // BLOCK * BLOCK)
        assert index.depth(prompt, "", 4) == expected
        index.record(prompt, "", server)
        sent.append((server, prompt))


def test_index_forgets_the_oldest() -> None:
    index = PrefixIndex(max_blocks=4)
    for i in range(10):
        index.record([i] * BLOCK, "", 0)
    assert len(index) == 4 and index.depth([9] * BLOCK, "", 1) == [BLOCK] and index.depth([0] * BLOCK, "", 1) == [0]


def test_load_comes_before_the_prefix() -> None:
    assert pick_server({0: 5, 1: 4}, [640, 0]) == 0
    assert pick_server({0: 50, 1: 4}, [640, 0]) == 1, "a server with much more work loses its favourite prompt"
    assert pick_server({0: 3, 1: 2, 2: 2}, [0, 0, 0]) == 1


# ------------------------------------------------------------------ engine flags


def options(environ: dict[str, str], *flags: str) -> EngineOptions:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_options(parser.parse_args([*flags]), environ)


def test_local_engine_is_the_default_without_a_server() -> None:
    assert options({}, "--model", "m").kind == "local"
    found = options({"VLLM_BASE_URLS": "http://a:1,http://b:1", "VLLM_MODEL": "served"}, "--model", "folder")
    assert (found.kind, found.model, found.served_model) == ("vllm", "folder", "served")
    assert found.base_urls == "http://a:1,http://b:1"
    assert options({"VLLM_BASE_URL": "http://a:1/v1"}, "--model", "m").base_urls == "http://a:1/v1"
    assert options({"VLLM_BASE_URLS": "http://a:1"}, "--model", "m", "--engine", "local").base_urls == ""
    flag = options({"VLLM_BASE_URLS": "http://a:1"}, "--model", "m", "--base-url", "http://b:2")
    assert flag.base_urls == "http://b:2"


def test_no_model_is_said() -> None:
    with pytest.raises(InputError, match="--model or VLLM_MODEL"):
        options({}, "--model", "")
    with pytest.raises(InputError, match="--max-rows"):
        options({}, "--model", "m", "--max-rows", "0")


async def test_open_engine_takes_context_and_stop_tokens_from_server_and_model(smollm2: Path) -> None:
    with ScriptedServer(max_model_len=777, api_key="k") as server:
        opened = await open_engine(EngineOptions(str(smollm2), "vllm", "scripted", server.url, "k"))
        assert opened.max_model_len == 777 and opened.fit(16384) == 777 and opened.fit(100) == 100
        assert opened.model == "scripted" and opened.engine.stop_token_ids == (2,)  # type: ignore[attr-defined]
        assert opened.n_sampled_tokens == 0
        await opened.engine.close()


async def test_adapter_that_the_server_was_started_with(smollm2: Path) -> None:
    with ScriptedServer() as server:
        server.adapters["builtin"] = "/somewhere"
        opened = await open_engine(EngineOptions(str(smollm2), "vllm", "scripted", server.url))
        assert await attach_adapter(opened, "builtin", None) == "builtin"
        from train.engine import SamplingParams

        await opened.engine.sample([5], SamplingParams(2), "builtin")
        await opened.engine.unload_adapter("builtin")
        assert "builtin" in server.adapters, "it is not ours to unload"
        with pytest.raises(InputError, match=r"neither a path nor served.*builtin"):
            await attach_adapter(opened, "unknown", None)
        await opened.engine.close()


async def test_bare_name_on_the_local_engine_is_refused(smollm2: Path) -> None:
    codec = ChatCodec.from_model(str(smollm2))
    opened = OpenEngine(ScriptedEngine(codec, right_answer), codec, "local", "m", None)
    assert opened.fit(123) == 123
    with pytest.raises(InputError, match="not found"):
        await attach_adapter(opened, "lookup", None)


# ------------------------------------------------------------------ adapter files


def test_adapter_lists_are_read() -> None:
    assert parse_adapters("a/b/x, y=c/d.safetensors,e/z.safetensors,f/") == {
        "x": "a/b/x",
        "y": "c/d.safetensors",
        "z": "e/z.safetensors",
        "f": "f/",
    }
    assert parse_adapters("") == {}
    with pytest.raises(InputError, match="'x' appears twice"):
        parse_adapters("a/x,b/x.safetensors")


def test_one_file_becomes_a_folder_for_as_long_as_it_is_needed(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    tensors = {"base_model.model.q_proj.lora_A.weight": torch.ones(2, 3)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"peft_config": json.dumps(config)})
    with as_folders({"x": str(tmp_path / "x.safetensors")}) as folders:
        folder = Path(folders["x"])
        assert json.loads((folder / "adapter_config.json").read_text()) == config
        assert load_file(folder / "adapter_model.safetensors").keys() == tensors.keys()
    assert not folder.exists()


def test_bad_adapters_are_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    save_file({"a": torch.ones(1)}, tmp_path / "bare.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "prompt").mkdir()
    (tmp_path / "prompt" / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING"}')
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for name, expected in {
        "junk.safetensors": "not a safetensors file",
        "bare.safetensors": "no peft_config",
        "empty": "not found",
        "prompt": "LoRA adapter_config",
        "half": "adapter_model.safetensors is missing",
        "none": "not found",
    }.items():
        with pytest.raises(InputError, match=expected), as_folders({"a": str(tmp_path / name)}):
            pass
    with pytest.raises(InputError, match="no peft_config"):
        unpack_file(tmp_path / "bare.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ user simulator


def user(server: ScriptedServer, **changes: Any) -> UserLLM:
    return UserLLM(server.url, "u", **{"timeout_s": 0.5, "backoff_s": 0.01, **changes})


def test_user_simulator_answers(scripted_server: ScriptedServer) -> None:
    scripted_server.chat = lambda messages, body: f"I said {messages[-1]['content']}"
    assert user(scripted_server, temperature=0.3)([{"role": "user", "content": "hi"}]) == "I said hi"
    body = scripted_server.calls("/v1/chat/completions")[0]
    assert body["temperature"] == 0.3 and body["max_tokens"] == 256


@pytest.mark.parametrize(
    ("mode", "kind"), [("500", "server"), ("hang", "timeout"), ("garbage", "nonsense"), ("refuse", "server")]
)
def test_user_simulator_faults_are_typed_never_an_empty_answer(
    scripted_server: ScriptedServer, mode: str, kind: str
) -> None:
    scripted_server.fail = mode
    with pytest.raises(AgentError, match="user simulator") as caught:
        user(scripted_server, timeout_s=0.1)([])
    assert caught.value.kind == kind and len(scripted_server.calls("/v1/chat/completions")) == 4
    scripted_server.fail, scripted_server.fail_times = mode, 2
    assert user(scripted_server, timeout_s=0.1)([]) == "ok"


def test_user_simulator_without_text_or_permission(scripted_server: ScriptedServer) -> None:
    scripted_server.chat = lambda messages, body: " "
    with pytest.raises(AgentError, match="no text") as caught:
        user(scripted_server)([])
    assert caught.value.kind == "nonsense"
    scripted_server.api_key, before = "k", len(scripted_server.requests)
    with pytest.raises(AgentError, match="401"):
        user(scripted_server)([])
    assert len(scripted_server.requests) == before + 1, "a refusal is not tried again"
    scripted_server.chat = lambda messages, body: "yes"
    assert user(scripted_server, api_key="k")([]) == "yes"


def test_user_flags_belong_together() -> None:
    parser = argparse.ArgumentParser()
    add_user_llm_flags(parser)
    assert user_llm_from(parser.parse_args([])) is None
    with pytest.raises(InputError, match="both"):
        user_llm_from(parser.parse_args(["--user-llm-url", "http://a:1"]))
    found = user_llm_from(parser.parse_args(["--user-llm-url", "http://a:1/v1", "--user-llm-model", "u"]))
    assert found is not None and found.url == "http://a:1"


class TalkingGame(tiny_game.TinyGame):
    """Asks a user simulator in every step."""

    def __init__(self, user_llm: Any) -> None:
        super().__init__()
        self.user_llm = user_llm

    def step(self, action_json: str) -> None:
        super().step(action_json)
        self.messages.append({"role": "user", "content": self.user_llm(self.messages)})


TALKING = GameSpec("talking", TalkingGame, needs_user_llm=True, max_gen_tokens=48, tools_in="system_prompt")


def test_waiting_for_one_user_does_not_stop_other_episodes(smollm2: Path, scripted_server: ScriptedServer) -> None:
    codec = ChatCodec.from_model(str(smollm2))
    scripted_server.delay_s = 0.3
    found: list[Episode] = []
    asyncio.run(
        collect(
            TALKING,
            ScriptedEngine(codec, right_answer),
            codec,
            [Job(s) for s in range(4)],
            EpisodeParams(max_seq_length=1024),
            concurrency=4,
            on_episode=lambda job, episode: found.append(episode),
            user_llm=user(scripted_server, timeout_s=5),
        )
    )
    assert len(found) == 4 and all(e.reward == 1.0 for e in found) and scripted_server.max_in_flight >= 3


def test_dead_user_simulator_is_a_server_fault_and_no_reward(smollm2: Path) -> None:
    from pipeline.files import ServerError
    from train.episode import run_episode

    codec = ChatCodec.from_model(str(smollm2))
    dead = UserLLM(f"http://127.0.0.1:{free_port()}", "u", timeout_s=0.2, backoff_s=0.01)
    params = EpisodeParams(max_seq_length=1024)
    episode = asyncio.run(
        run_episode(TALKING, TalkingGame(dead), ScriptedEngine(codec, right_answer), codec, 1, params)
    )
    assert isinstance(episode.result.outcome, Failed) and episode.result.outcome.kind == "server"
    with pytest.raises(ServerError, match="user simulator"):
        engine = ScriptedEngine(codec, right_answer)
        nothing: Any = lambda job, episode: None  # noqa: E731
        asyncio.run(collect(TALKING, engine, codec, [Job(1)], params, on_episode=nothing, user_llm=dead))
