"""The chat client by itself: pauses, schema modes, costs, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from scripted_server import ScriptedServer

from pipeline.chat_client import Answer, ChatClient, Usage
from pipeline.endpoint import Endpoint, SchemaMode
from pipeline.files import ServerError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(chat=lambda messages, body: '{"n": 1}') as running:
        yield running


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses are recorded instead of slept."""
    seen: list[float] = []
    sleep = asyncio.sleep

    async def record(seconds: float) -> None:
        if seconds:  # the scripted server sleeps for 0 s
            seen.append(seconds)
        await sleep(0)

    monkeypatch.setattr("pipeline.endpoint.asyncio.sleep", record)
    return seen


async def ask(server: ScriptedServer, *, retries: int = 3, mode: SchemaMode = "json_schema", key: str = "") -> Answer:
    endpoint = Endpoint(server.url, "scripted", key, timeout_s=10, retries=retries, schema_mode=mode)
    async with ChatClient(endpoint) as client:
        return await client.ask("be brief", "how many?", SCHEMA, max_tokens=10, temperature=0.5, seed=7)


def bodies(server: ScriptedServer) -> list[dict[str, Any]]:
    return server.calls("/v1/chat/completions")


async def test_the_request_holds_what_it_should(server: ScriptedServer) -> None:
    assert (await ask(server)).data == {"n": 1}
    (body,) = bodies(server)
    assert [m["role"] for m in body["messages"]] == ["system", "user"]
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("scripted", 10, 0.5, 7)
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert body["response_format"]["json_schema"]["strict"] is True


@pytest.mark.parametrize(("mode", "expected"), [("json_object", {"type": "json_object"}), ("none", None)])
async def test_servers_without_schemas_can_be_used(server: ScriptedServer, mode: SchemaMode, expected: Any) -> None:
    await ask(server, mode=mode)
    assert bodies(server)[0].get("response_format") == expected


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_v1_suffix_is_optional(url: str) -> None:
    assert Endpoint(url, "m").url == "http://h:1/v1/chat/completions"


async def test_pauses_grow_and_each_attempt_has_its_own_seed(server: ScriptedServer, pauses: list[float]) -> None:
    server.fail, server.fail_times = "503", 3
    assert (await ask(server)).data == {"n": 1}
    assert [b["seed"] for b in bodies(server)] == [7, 8, 9, 10]
    assert len(pauses) == 3
    for n, pause in enumerate(pauses):
        assert 0.5 * 0.5 * 2**n <= pause <= 0.5 * 2**n  # half to all of a doubling pause


async def test_the_last_attempt_is_not_followed_by_a_pause(server: ScriptedServer, pauses: list[float]) -> None:
    server.fail = "500"
    with pytest.raises(ServerError, match="2 attempts"):
        await ask(server, retries=1)
    assert len(pauses) == 1


async def test_retry_after_is_honoured_within_bounds(pauses: list[float]) -> None:
    waits = iter(["2", "100000", "soon", None])

    async def limited(request: web.Request) -> web.Response:
        wait = next(waits)
        if wait is None:
            return web.json_response({"choices": [{"message": {"content": '{"n": 2}'}}]})
        return web.json_response({}, status=429, headers={"Retry-After": wait})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", limited)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        async with ChatClient(Endpoint(f"http://127.0.0.1:{port}", "m", retries=3)) as client:
            answer = await client.ask("s", "u", SCHEMA, max_tokens=1, temperature=0, seed=0)
    finally:
        await runner.cleanup()
    assert answer.data == {"n": 2}
    assert pauses[0] == 2 and pauses[1] == 30 and pauses[2] < 3


@pytest.mark.parametrize("content", ["", "1", '{"n": "1"}', '{"n": 1, "m": 2}', "[" * 100_000, '{"n": NaN}'])
async def test_answers_outside_the_schema_are_asked_again(server: ScriptedServer, content: str) -> None:
    answers = iter([content, '{"n": 5}'])
    server.chat = lambda messages, body: next(answers)
    assert (await ask(server)).data == {"n": 5}
    assert len(bodies(server)) == 2


@pytest.mark.parametrize(
    "response",
    [
        {},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"message": {"content": None}}]},
        {"choices": [{"message": {"content": 3}}]},
        [],
    ],
)
async def test_nonsense_responses_are_asked_again_then_reported(server: ScriptedServer, response: Any) -> None:
    server.edit = lambda _: response
    with pytest.raises(ServerError, match="attempts"):
        await ask(server, retries=1)
    assert len(bodies(server)) == 2


@pytest.mark.parametrize("status", [400, 403, 404, 422])
async def test_refusals_are_not_repeated(status: int) -> None:
    seen = []

    async def refuse(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"error": {"message": "no such\nmodel"}}, status=status)

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", refuse)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ChatClient(Endpoint(url, "m")) as client:
            with pytest.raises(ServerError, match=f"HTTP {status}.*no such"):
                await client.ask("s", "u", SCHEMA, max_tokens=1, temperature=0, seed=0)
    finally:
        await runner.cleanup()
    assert len(seen) == 1


async def test_the_key_is_sent_and_never_shown(server: ScriptedServer) -> None:
    server.api_key = "right"
    assert (await ask(server, key="right")).data == {"n": 1}
    with pytest.raises(ServerError) as refused:
        await ask(server, key="very-wrong-key")
    assert "401" in str(refused.value) and "very-wrong-key" not in str(refused.value)


async def test_costs_of_all_answered_attempts_are_counted(server: ScriptedServer) -> None:
    answers = iter(["nonsense", '{"n": 5}'])
    server.chat = lambda messages, body: next(answers)
    server.edit = lambda r: r | {"usage": {"prompt_tokens": 10, "completion_tokens": 3}}
    answer = await ask(server)
    assert answer.usage == Usage(2, 20, 6)


@pytest.mark.parametrize("usage", [None, [], {"prompt_tokens": "many"}, {"prompt_tokens": -5}, {}])
def test_strange_usage_counts_as_nothing(usage: Any) -> None:
    assert Usage.of(usage) == Usage(1, 0, 0)


async def test_two_clients_share_nothing(server: ScriptedServer) -> None:
    server.edit = lambda r: r | {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    first, second = await asyncio.gather(ask(server), ask(server))
    assert first.usage == second.usage == Usage(1, 1, 1)
    assert json.dumps(first.data) == json.dumps(second.data)
