"""What is sent to a stock vLLM server and what is read from it: pure functions, checked answers (vLLM 0.22-0.33)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from game_registry import AgentError
from pipeline.files import InputError
from train.engine import Sample, SamplingParams

MIN_LOGPROB = -1e5  # vLLM writes -9999 for what is masked; anything far below is no log-probability
MAX_POSITIVE_LOGPROB = 1e-3  # rounding of a log-softmax; anything above is no log-probability
FORCE = 100.0  # added to a logit, the most that servers take
KNOWS_IDS = "the server must know return_token_ids (vLLM >= 0.22)"


class NonsenseAnswer(ValueError):
    """An answer that no correct server gives. ``retry``: another try may help (a cut or garbled body)."""

    def __init__(self, text: str, *, retry: bool = False) -> None:
        super().__init__(text)
        self.retry = retry


@dataclasses.dataclass(frozen=True)
class ServedModels:
    """``/v1/models``: names of the base model, loaded adapters (name -> folder, "" where it is not told), and the
    context length in tokens."""

    base: tuple[str, ...]
    roots: tuple[str, ...]
    adapters: Mapping[str, str]
    max_model_len: int | None


def parse_base_urls(text: str) -> tuple[str, ...]:
    """``http://a:1,http://b:2/v1`` -> roots without the ``/v1``, each once.

    Raises:
        InputError: empty, or not http(s) URLs.
    """
    urls = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        url = re.sub(r"/v1/?$", "", part).rstrip("/")
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise InputError(f"server URL {part!r}: expected http://HOST:PORT; correct it")
        urls.append(url)
    if not urls:
        raise InputError("no server URL given; expected http://HOST:PORT[,http://HOST:PORT]")
    return tuple(dict.fromkeys(urls))


def fitted(params: SamplingParams, n_prompt: int, context: int | None) -> SamplingParams:
    """``params`` with no more tokens than the server's ``context`` has room for.

    Raises:
        AgentError: the prompt is empty, or fills it.
    """
    if n_prompt == 0:
        raise AgentError("nonsense", "the prompt has no tokens")
    if context is None or n_prompt + params.max_new_tokens <= context:
        return params
    room = context - n_prompt
    if room < 1:
        raise AgentError(
            "context", f"prompt of {n_prompt} tokens, server context {context}; lower --max-seq-length"
        )
    return SamplingParams(room, params.temperature, params.stop, params.seed)


def completion_request(
    model: str, prompt_ids: Sequence[int], params: SamplingParams, stop_token_ids: Sequence[int], salt: str
) -> dict[str, Any]:
    """The body of one sampled turn.

    The whole distribution is sampled: top-p, top-k, min-p and penalties are switched off by name, since a server takes
    its defaults for absent ones from the model's ``generation_config.json``. The stop tokens are ours alone
    (``ignore_eos``), so both engines end turns alike. ``cache_salt`` keeps keys and values of an earlier run that used
    the same adapter name out of this one.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt_ids),
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "stop_token_ids": list(stop_token_ids),
        "skip_special_tokens": False,
        "cache_salt": salt,
    }
    if params.stop:
        body["stop"] = list(params.stop)
    if params.seed is not None:
        body["seed"] = params.seed
    return body


def biased_request(model: str, prompt_ids: Sequence[int], biases: Mapping[int, float], salt: str) -> dict[str, Any]:
    """The body that asks for the most probable token after ``prompt_ids`` with ``biases`` (nats) on logits.

    A bias on one token that makes it the most probable asks for its log-prob: a server with raw log-probs reports the
    one that it has without that, one with processed log-probs the one with it: ``without_bias``. ``allowed_token_ids``
    would say it more plainly, but in vLLM 0.22 with its second model runner (Qwen3) a kernel masks the allowed token
    too now and then: it writes -inf everywhere and the token's logit back without a barrier between.
    """
    body = completion_request(model, prompt_ids, SamplingParams(1, 0.0), (), salt)
    return body | {"logit_bias": {str(token): bias for token, bias in biases.items()}}


def read_biased(payload: Any, prompt_ids: Sequence[int]) -> tuple[int, float]:
    """The token in the answer to ``biased_request``, and its log-prob.

    Raises:
        NonsenseAnswer: as in ``read_sample``.
    """
    sample = read_sample(payload, prompt_ids, SamplingParams(1, 0.0), ())
    return sample.token_ids[0], sample.logprobs[0]


def without_bias(logprob: float, bias: float) -> float:
    """The log-prob of a token from the one that it has with ``bias`` (nats) on its logit.

    A bias moves the log-odds of a token by exactly that much: log(p / (1 - p)) = log(q / (1 - q)) - bias. Rounding of
    ``logprob`` is magnified by (1 - p) / (1 - q), see ``magnified``. 0 stays 0: as certain as fp32 can tell.
    """
    if logprob >= 0.0:
        return 0.0
    log_odds = logprob - math.log(-math.expm1(logprob)) - bias
    return -math.log1p(math.exp(-log_odds)) if log_odds > -700.0 else log_odds


def magnified(logprob: float, bias: float) -> float:
    """How many times a rounding error of the biased log-prob is larger in ``logprob``: 1 + p (exp(bias) - 1)."""
    return 1.0 + math.exp(logprob) * math.expm1(bias)


def only_choice(payload: Any) -> dict[str, Any]:
    choices = payload.get("choices") if isinstance(payload, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise NonsenseAnswer(f"expected one choice, found {str(payload)[:120]!r}", retry=True)
    return choices[0]


def _int_list(value: Any, what: str, remedy: str) -> list[int]:
    if not isinstance(value, list) or set(map(type, value)) - {int}:  # at C speed: prompts are long
        raise NonsenseAnswer(f"{what}: expected a list of token ids, found {str(value)[:60]!r}; {remedy}")
    return value


def read_sample(
    payload: Any, prompt_ids: Sequence[int], params: SamplingParams, stop_token_ids: Sequence[int]
) -> Sample:
    """The sampled turn in a completion response, token ids verbatim.

    Raises:
        NonsenseAnswer: missing or foreign token ids, log-probs that are missing, NaN or positive, a finish reason that
            does not fit the tokens.
    """
    choice = only_choice(payload)
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise NonsenseAnswer(f"finish_reason: expected stop or length, found {reason!r}", retry=True)
    echoed = _int_list(choice.get("prompt_token_ids"), "prompt_token_ids", KNOWS_IDS)
    if echoed != list(prompt_ids):
        raise NonsenseAnswer(f"the server answered another prompt ({len(echoed)} tokens, sent {len(prompt_ids)})")
    token_ids = _int_list(choice.get("token_ids"), "token_ids", KNOWS_IDS)
    if not token_ids or len(token_ids) > params.max_new_tokens:
        raise NonsenseAnswer(f"token_ids: expected 1 to {params.max_new_tokens} tokens, found {len(token_ids)}")
    if reason == "length" and len(token_ids) < params.max_new_tokens:
        raise NonsenseAnswer(
            f"the server cut the turn at {len(token_ids)} of {params.max_new_tokens} tokens; start it with "
            "--generation-config vllm, or without a max_new_tokens in generation_config.json"
        )
    if reason == "stop" and token_ids[-1] not in stop_token_ids and not params.stop:
        raise NonsenseAnswer(f"the turn stopped at token {token_ids[-1]}, which is none of {list(stop_token_ids)}")
    logprobs = _part(choice, "logprobs").get("token_logprobs")
    return Sample(tuple(token_ids), _checked_logprobs(logprobs, len(token_ids)), reason)


def _part(choice: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside a choice; empty where the server left it out."""
    found = choice.get(name)
    if found is not None and not isinstance(found, dict):
        raise NonsenseAnswer(f"{name}: expected an object, found {str(found)[:60]!r}")
    return found or {}


def _checked_logprobs(values: Any, count: int) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != count:
        found = len(values) if isinstance(values, list) else values
        raise NonsenseAnswer(f"token_logprobs: expected {count} numbers, found {found!r}")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not MIN_LOGPROB <= value <= MAX_POSITIVE_LOGPROB:  # NaN fails too
            raise NonsenseAnswer(f"token_logprobs: expected finite log-probabilities <= 0, found {value!r:.60}")
    return tuple(min(0.0, float(v)) for v in values)


def read_models(payload: Any) -> ServedModels:
    """What ``/v1/models`` lists.

    Raises:
        NonsenseAnswer: not a model list.
    """
    data = payload.get("data") if isinstance(payload, dict) else None
    rows = data if isinstance(data, list) else []
    if not rows or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in rows):
        raise NonsenseAnswer(f"/v1/models: expected a list of models, found {str(payload)[:80]!r}", retry=True)
    base = [m for m in rows if m.get("parent") is None]
    lengths = [m["max_model_len"] for m in base if m.get("max_model_len") is not None]
    if any(type(length) is not int or length < 1 for length in lengths):
        raise NonsenseAnswer(f"/v1/models: expected a positive max_model_len, found {lengths!r:.60}", retry=True)
    return ServedModels(
        base=tuple(m["id"] for m in base),
        roots=tuple(str(m.get("root")) for m in base),
        adapters={m["id"]: str(m.get("root") or "") for m in rows if m.get("parent") is not None},
        max_model_len=min(lengths) if lengths else None,
    )


def count_engines(metrics: str) -> int | None:
    """Data-parallel engines behind one URL, read from ``/metrics``; None when the server does not say."""
    labels = re.findall(r'^vllm:num_requests_running\{[^}]*engine="(\d+)"', metrics, re.MULTILINE)
    return len(set(labels)) or None


def error_message(status: int, text: str) -> str:
    """One line of an error body, of either of the two shapes that servers use."""
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    if isinstance(body, dict):
        error = body.get("error", body)
        body = error.get("message", error) if isinstance(error, dict) else error
    return f"HTTP {status}: {' '.join(str(body).split())[:300]}"


def own_name(name: str, folder: str) -> str:
    """The name of an adapter where another run has ``name``."""
    return f"{name}.{hashlib.blake2b(str(Path(folder).parent).encode(), digest_size=3).hexdigest()}"


def of_others(loaded: Mapping[str, str], name: str, folder: str) -> bool:
    """Is an adapter of that name loaded from another folder?"""
    return bool(loaded.get(name)) and server_path(loaded[name]) != Path(folder).resolve()


def server_path(root: str) -> Path | None:
    """The folder that a server names as its model's; None where the text is no path (a NUL in it)."""
    return None if "\0" in root else Path(root).resolve()
