"""The scripted server is what other tests stand on, so its own behaviour is checked first."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from scripted_server import ScriptedServer


def post(server: ScriptedServer, path: str, body: dict[str, Any], timeout: float = 5) -> Any:
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.loads(response.read())


def completion(server: ScriptedServer, timeout: float = 5) -> Any:
    return post(server, "/v1/completions", {"model": "scripted", "prompt": [5, 6], "max_tokens": 3}, timeout)


def test_answers_token_ids_and_records_requests(scripted_server: ScriptedServer) -> None:
    scripted_server.completion = lambda ids, body: [ids[0] + 1, 2]
    choice = completion(scripted_server)["choices"][0]
    assert choice["token_ids"] == [6, 2] and choice["prompt_token_ids"] == [5, 6]
    assert choice["finish_reason"] == "stop" and len(choice["logprobs"]["token_logprobs"]) == 2
    assert scripted_server.calls("/v1/completions") == [{"model": "scripted", "prompt": [5, 6], "max_tokens": 3}]


def test_cuts_at_the_token_limit(scripted_server: ScriptedServer) -> None:
    scripted_server.completion = lambda ids, body: [9] * 10
    choice = completion(scripted_server)["choices"][0]
    assert choice["token_ids"] == [9, 9, 9] and choice["finish_reason"] == "length"


@pytest.mark.parametrize("mode", ["refuse", "500", "503", "hang", "garbage", "die_midway"])
def test_each_failure_mode_fails_and_clears(scripted_server: ScriptedServer, mode: str) -> None:
    scripted_server.fail, scripted_server.fail_times = mode, 1
    with pytest.raises((OSError, ValueError, http.client.HTTPException)):
        completion(scripted_server, timeout=0.5)
    assert completion(scripted_server)["choices"][0]["token_ids"] == [2]


def test_stop_refuses_and_start_comes_back_without_adapters(scripted_server: ScriptedServer) -> None:
    request = {"lora_name": "a@v1", "lora_path": "/x"}
    with pytest.raises(json.JSONDecodeError):  # the answer is plain text, as vLLM's is
        post(scripted_server, "/v1/load_lora_adapter", request)
    assert scripted_server.adapters == {"a@v1": "/x"}
    scripted_server.stop()
    with pytest.raises(urllib.error.URLError):
        completion(scripted_server)
    scripted_server.start()
    assert completion(scripted_server)["choices"][0]["token_ids"] == [2]
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(scripted_server, "/v1/completions", {"model": "a@v1", "prompt": [5], "max_tokens": 1})
    assert caught.value.code == 404


def test_chat_takes_text_or_a_message(scripted_server: ScriptedServer) -> None:
    scripted_server.chat = lambda messages, body: messages[-1]["content"].upper()
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    assert post(scripted_server, "/v1/chat/completions", body)["choices"][0]["message"]["content"] == "HI"
    scripted_server.chat = lambda messages, body: {"role": "assistant", "content": None, "tool_calls": []}
    assert post(scripted_server, "/v1/chat/completions", body)["choices"][0]["message"]["tool_calls"] == []
