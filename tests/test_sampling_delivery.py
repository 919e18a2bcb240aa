"""Adapter delivery: versioned names, unloading, and the canary that tells arrived weights from stale ones."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import decimal
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import SECOND, ScriptedServer

from game_registry import AgentError
from pipeline.files import InputError, ServerError
from train.delivery import (
    SCORED_TOKENS,
    SURE_TOKENS,
    AdapterDelivery,
    Canary,
    DeliveryError,
    adapter_name,
    compare_canary,
    spread_indices,
)
from train.engine import SamplingParams
from train.vllm_engine import VllmEngine
from train.vllm_pool import PoolTimes
from train.vllm_protocol import magnified, own_name, without_bias

FAST = PoolTimes(request_s=2.0, probe_every_s=0.1, probe_timeout_s=0.3, patience_s=0.3, backoff_s=0.01)
N = 200
IDS = tuple(range(10, 11 + N))
ROUNDING = 0.07  # nats rms between bf16 engines of equal weights


def logprobs(seed: int, around: np.ndarray | None = None, scale: float = 1.0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=N) * scale
    return np.minimum(-0.01, (np.full(N, -2.0) if around is None else around) + noise)


def canary(new: np.ndarray, old: np.ndarray) -> Canary:
    return Canary(IDS, tuple(new.tolist()), tuple(old.tolist()))


@pytest.mark.parametrize(
    "broken",
    [{"new_logprobs": (0.0,) * 3}, {"old_logprobs": ()}, {"new_logprobs": (math.nan,) * N}, {"token_ids": (1,)}],
)
def test_broken_canaries_are_refused(broken: dict[str, Any]) -> None:
    good = {"token_ids": IDS, "new_logprobs": (-1.0,) * N, "old_logprobs": (-1.0,) * N}
    with pytest.raises(InputError, match="canary"):
        Canary(**{**good, **broken})


# ------------------------------------------------------------------ against a server


def folder(tmp_path: Path, name: str) -> str:
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    return str(path)


def deliver(server: ScriptedServer, steps: Callable[[AdapterDelivery], Any]) -> Any:
    async def run() -> Any:
        engine = VllmEngine(server.url, "scripted", [2], times=FAST)
        try:
            return await steps(AdapterDelivery(engine))
        finally:
            await engine.close()

    return asyncio.run(run())


def serve(server: ScriptedServer, by_model: Callable[[str], np.ndarray]) -> None:
    """Prompt log-probs of the server; the first prompt token has none."""
    server.prompt_logprob = lambda ids, model: [-1.0, *np.minimum(-0.001, by_model(model)).tolist()]


def test_delivery_reports_its_time_and_both_errors(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, new if model == "lookup@v1" else old, ROUNDING))

    async def steps(delivery: AdapterDelivery) -> Any:
        return await delivery.deliver("lookup", 1, folder(tmp_path, "v1"), canary(new, old))

    report = deliver(scripted_server, steps)
    assert report.name == adapter_name("lookup", 1) == "lookup@v1"
    assert 0 < report.load_s <= report.seconds < 5
    assert report.canary.resolved and report.canary.error_new < report.canary.error_old


def test_a_server_is_asked_for_single_tokens(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    """Prompt log-probs beside turns would kill it, and an idle server can get turns of others at any moment."""
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, new if model == "lookup@v1" else old, ROUNDING))

    async def steps(delivery: AdapterDelivery) -> Any:
        return await delivery.deliver("lookup", 1, folder(tmp_path, "v1"), canary(new, old))

    report = deliver(scripted_server, steps)
    assert report.canary.resolved and report.canary.error_new < report.canary.error_old
    bodies = scripted_server.calls("/v1/completions")
    asked = {len(b["prompt"]): b for b in bodies}
    assert len(bodies) == len(asked) + 3 == SCORED_TOKENS + 3, "three to learn which log-probs the server reports"
    for position, body in asked.items():
        assert body["model"] == "lookup@v1" and body["prompt"] == list(IDS[:position]) and body["max_tokens"] == 1
        assert body["logit_bias"] == {str(IDS[position]): 100.0} and "prompt_logprobs" not in body
    chosen = sorted(i - 1 for i in asked)
    assert chosen[0] == 0 and chosen[-1] == N - 1 and max(np.diff(chosen)) <= N / (SCORED_TOKENS - 1) + 1
    assert report.canary.moved == pytest.approx(float(np.sqrt(np.mean((new - old)[chosen] ** 2))))


def test_rounding_of_the_trainer_alone_decides_nothing(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    """New and old log-probs that differ by the trainer's own rounding only: the server lies half way between them."""
    true = logprobs(0)
    serve(scripted_server, lambda model: logprobs(900 + int(model.split("@v")[1]), true, ROUNDING))

    async def steps(delivery: AdapterDelivery) -> list[bool]:
        resolved = []
        for k in range(1, 41):
            given = canary(logprobs(k, true, ROUNDING), logprobs(k - 1 or 500, true, ROUNDING))
            report = await delivery.deliver("a", k, folder(tmp_path, f"v{k}"), given)
            resolved.append(report.canary is not None and report.canary.resolved)
        return resolved

    assert not any(deliver(scripted_server, steps))
    asked = collections.Counter(body["model"] for body in scripted_server.calls("/v1/completions"))
    many = [asked[f"a@v{k}"] >= SURE_TOKENS for k in range(1, 9)]
    assert many == [k % 4 == 3 for k in range(8)], "every fourth undecided delivery is judged by many tokens"


def test_processed_log_probs_are_those_without_the_bias(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    """Such a server is judged as any other, beside turns, by several capabilities at once, and never by a prompt."""
    old, new = logprobs(0, scale=2.0), logprobs(1, logprobs(0, scale=2.0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, new if "@" in model else old, ROUNDING))
    scripted_server.processed_logprobs, scripted_server.delay_s = True, 0.02

    async def steps(delivery: AdapterDelivery) -> Any:
        engine: Any = delivery.engine
        stop = asyncio.Event()

        async def turns(k: int) -> int:
            done = 0
            while not stop.is_set():
                done += len((await engine.sample([5, 6, k], SamplingParams(4))).token_ids)
            return done

        running = [asyncio.create_task(turns(k)) for k in range(4)]
        reports = await asyncio.gather(
            *(delivery.deliver(c, 1, folder(tmp_path, c), canary(new, old)) for c in ("a", "b"))
        )
        stop.set()
        assert min(await asyncio.gather(*running)) > 0
        return reports

    chosen = spread_indices(N)
    served = np.minimum(-0.001, logprobs(2, new, ROUNDING))
    for report in deliver(scripted_server, steps):
        assert report.canary.resolved and not report.canary.wrong
        expected = float(np.sqrt(np.mean((served - new)[chosen] ** 2)))
        assert report.canary.error_new == pytest.approx(expected, abs=1e-3)
    bodies = scripted_server.calls("/v1/completions")
    assert all("prompt_logprobs" not in body for body in bodies)
    asked = [body for body in bodies if body["model"] == "a@v1"]
    assert len(asked) <= 2 * SCORED_TOKENS, "most tokens need one request, few more than two"


@pytest.mark.parametrize("logprob", [0.0, -1e-7, -1e-3, -0.5, -3.0, -3.99, -4.01, -9.0, -17.0, -33.0, -64.5, -90.0])
def test_every_log_prob_is_found_behind_a_bias(scripted_server: ScriptedServer, logprob: float) -> None:
    """The server's fp32 says 0 or samples another token where the bias is wrong for this token."""
    scripted_server.prompt_logprob = lambda ids, model: [logprob] * len(ids)
    scripted_server.processed_logprobs = True

    async def steps(delivery: AdapterDelivery) -> Any:
        engine: Any = delivery.engine
        for server in engine.pool.servers:
            server.processed_logprobs = True
        return await engine.score(engine.pool.servers[0], IDS[:3], [1, 2])

    assert deliver(scripted_server, steps) == pytest.approx([logprob] * 2, abs=1e-3)
    assert len(scripted_server.calls("/v1/completions")) <= 2 * 10


@pytest.mark.parametrize("bias", [0.0, 0.5, 4.0, 30.0, 100.0])
@pytest.mark.parametrize("logprob", [-1e-9, -0.01, -1.0, -20.0, -800.0])
def test_a_bias_moves_the_log_odds(logprob: float, bias: float) -> None:
    with decimal.localcontext(prec=80):
        probability, factor = decimal.Decimal(logprob).exp(), decimal.Decimal(bias).exp()
        biased = probability * factor / (1 + probability * (factor - 1))
        given, slope = float(biased.ln()), float((1 - probability) / (1 - biased))
    if given < -1e-12:  # nearer to 0 a double does not know the rest any more
        assert without_bias(given, bias) == pytest.approx(logprob, rel=1e-3)
    assert without_bias(0.0, bias) == 0.0
    assert magnified(logprob, bias) == pytest.approx(slope, rel=1e-9)


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("others", [-50.0, -86.0, -99.0, -200.0])
def test_the_mode_is_learnt_where_most_tokens_are_impossible(
    scripted_server: ScriptedServer, processed: bool, others: float
) -> None:
    """The tokens that are forced to learn it are the two most probable ones, however far all others are below."""
    scripted_server.prompt_logprob = lambda ids, model: [-1.0 if t in (SECOND, IDS[1]) else others for t in ids]
    scripted_server.processed_logprobs = processed

    async def steps(delivery: AdapterDelivery) -> Any:
        engine: Any = delivery.engine
        found = await engine.score(engine.pool.servers[0], IDS[:2], [1])
        return found, engine.pool.servers[0].processed_logprobs

    found, mode = deliver(scripted_server, steps)
    assert found == pytest.approx([-1.0], abs=1e-3) and mode is processed


async def test_a_server_that_takes_no_bias_is_named(scripted_server: ScriptedServer) -> None:
    """As one with speculative decoding."""
    scripted_server.refuse_bias = True
    engine = VllmEngine(scripted_server.url, "scripted", [2], times=FAST)
    try:
        with pytest.raises(InputError, match=r"logit_bias.*; log-probs are checked with it"):
            await engine.sample([5], SamplingParams(4, 0.7))
        with pytest.raises(InputError, match=r"logit_bias.*; log-probs are checked with it"):
            await engine.score(engine.pool.servers[0], IDS[:2], [1])
    finally:
        await engine.close()


async def test_a_server_that_ignores_the_bias_is_named(
    scripted_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a proxy that drops what it does not know: a token that is certain anyway would pass for a forced one."""
    monkeypatch.setattr(ScriptedServer, "_biased", lambda *_: None)
    scripted_server.logprob = lambda token, body: -0.1
    engine = VllmEngine(scripted_server.url, "scripted", [2], times=FAST)
    try:
        with pytest.raises(AgentError, match=r"logit_bias, .* is ignored") as caught:
            await engine.sample([5], SamplingParams(4, 0.7))
        assert caught.value.kind == "nonsense"
    finally:
        await engine.close()


async def test_a_restarted_server_may_report_others(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    """Nobody noticed the restart but the turn that met a server without its adapter."""
    engine = VllmEngine(scripted_server.url, "scripted", [2], times=dataclasses.replace(FAST, probe_every_s=600.0))
    scripted_server.processed_logprobs = True
    try:
        await engine.load_adapter("a@v1", folder(tmp_path, "v1"))
        await engine.sample([5], SamplingParams(4, 0.7), "a@v1")
        scripted_server.adapters.clear()
        scripted_server.processed_logprobs = False
        with pytest.raises(InputError, match="--logprobs-mode processed_logprobs"):
            await engine.sample([5], SamplingParams(4, 0.7), "a@v1")
    finally:
        await engine.close()


# ------------------------------------------------------------------ rehearsals


def rehearse(tmp_path: Path, *servers: ScriptedServer, cancel_after_s: float | None = None) -> None:
    async def run() -> None:
        engine = VllmEngine(",".join(s.url for s in servers), "scripted", [2], times=FAST)
        try:
            await engine.start()
            work = AdapterDelivery(engine).rehearse("a", 0, folder(tmp_path, "v0"))
            await asyncio.wait_for(work, cancel_after_s)
        finally:
            await engine.close()

    asyncio.run(run())


LOAD = ("/v1/load_lora_adapter",)


def test_a_rehearsal_leaves_nothing_behind(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    with ScriptedServer() as other:
        rehearse(tmp_path, scripted_server, other)
        for server in (scripted_server, other):
            assert server.adapters == {} and len(server.calls("/v1/load_lora_adapter")) == 1


def test_one_server_that_lives_and_loads_nothing(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    """It would be dropped at every delivery and come back in between."""
    with ScriptedServer(fail="500", fail_paths=LOAD) as other:
        with pytest.raises(InputError, match=rf"{other.url} does not load adapters \(.*scripted failure"):
            rehearse(tmp_path, scripted_server, other)
        assert scripted_server.adapters == {}


@pytest.mark.parametrize("fail", ["500", "hang"])
def test_the_only_server_lives_and_loads_nothing(scripted_server: ScriptedServer, tmp_path: Path, fail: str) -> None:
    scripted_server.fail, scripted_server.fail_paths = fail, LOAD
    with pytest.raises(InputError, match=rf"{scripted_server.url} does not load adapters"):
        rehearse(tmp_path, scripted_server)


def test_a_rehearsal_takes_no_version_in_use_off(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    async def steps(delivery: AdapterDelivery) -> None:
        await delivery.deliver("a", 0, folder(tmp_path, "v0"))
        with pytest.raises(InputError, match="in use"):
            await delivery.rehearse("a", 0, folder(tmp_path, "v0"))

    deliver(scripted_server, steps)
    assert list(scripted_server.adapters) == ["a@v0"]


def test_two_runs_share_a_server(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    """Of one capability at one version: neither takes the other's adapter off, or samples from it."""
    own, their = tmp_path / "own", tmp_path / "their"
    own.mkdir()
    their.mkdir()
    with ScriptedServer() as other:

        async def both() -> None:
            first = VllmEngine(other.url, "scripted", [2], times=FAST)
            second = VllmEngine(f"{scripted_server.url},{other.url}", "scripted", [2], times=FAST)
            theirs, mine = AdapterDelivery(first), AdapterDelivery(second)
            try:
                folders = {"a@v1": folder(their, "a@v1")}
                assert (await theirs.deliver("a", 1, folders["a@v1"])).name == "a@v1"
                await mine.rehearse("a", 1, folder(own, "a@v1"))
                assert scripted_server.adapters == {} and other.adapters == folders
                assert (await mine.deliver("a", 1, folder(own, "a@v1"))).name == "a@v1"
                name = own_name("a@v1", folder(own, "a@v1"))
                assert re.fullmatch(r"a@v1\.[0-9a-f]{6}", name)
                assert other.adapters == folders | {name: folder(own, "a@v1")}
                assert scripted_server.adapters == {"a@v1": folder(own, "a@v1")}
                for server, there in zip(second.pool.servers, ("a@v1", name), strict=True):
                    second.pool.servers[1 - server.index].alive = False
                    assert (await second.sample([1], SamplingParams(4), "a@v1")).token_ids == (2,)
                    asked = (scripted_server, other)[server.index].calls("/v1/completions")
                    assert [body["model"] for body in asked] == [there]
                    second.pool.servers[1 - server.index].alive = True
                await mine.close()
                assert other.adapters == {"a@v1": folders["a@v1"]} and scripted_server.adapters == {}
                assert (await theirs.deliver("a", 2, folder(their, "a@v2"))).name == "a@v2"
            finally:
                await first.close()
                await second.close()

        asyncio.run(both())


def test_what_a_killed_run_left_is_loaded_anew(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    path = folder(tmp_path, "a@v1")
    scripted_server.adapters["a@v1"] = path
    report = deliver(scripted_server, lambda delivery: delivery.deliver("a", 1, path))
    assert report.name == "a@v1" and scripted_server.adapters == {"a@v1": path}
    assert [len(scripted_server.calls(f"/v1/{do}_lora_adapter")) for do in ("load", "unload")] == [2, 1]


def test_a_server_that_died_in_a_rehearsal_is_no_fault(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    with ScriptedServer(fail="refuse", fail_paths=(*LOAD, "/health")) as other:
        rehearse(tmp_path, scripted_server, other)
        assert not other.adapters


def test_a_load_that_hangs_is_not_asked_again(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    with ScriptedServer(fail="hang", fail_paths=LOAD) as other:
        with pytest.raises(InputError, match=r"does not load adapters \(.*no answer within 2 s"):
            rehearse(tmp_path, scripted_server, other)
        assert len(other.calls("/v1/load_lora_adapter")) == 1


def test_a_rehearsal_that_is_cancelled_takes_back_what_arrives(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    with ScriptedServer(fail="hang", fail_paths=LOAD) as other:
        with pytest.raises(TimeoutError):
            rehearse(tmp_path, scripted_server, other, cancel_after_s=0.5)
        for server in (scripted_server, other):
            assert len(server.calls("/v1/unload_lora_adapter")) >= 1 and server.adapters == {}


def test_no_bias_makes_an_impossible_token_certain(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    scripted_server.prompt_logprob = lambda ids, model: [-150.0] * len(ids)

    async def steps(delivery: AdapterDelivery) -> Any:
        engine: Any = delivery.engine
        engine.pool.servers[0].processed_logprobs = True
        return await engine.score(engine.pool.servers[0], IDS[:3], [2])

    with pytest.raises(ServerError, match=r"cannot score a sequence .*no bias up to 100"):
        deliver(scripted_server, steps)


def test_one_certain_token_is_no_sign_of_processed_log_probs(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    served = [-1.0, *np.minimum(-0.001, logprobs(2, new, ROUNDING)).tolist()]
    last = spread_indices(N)[-1] + 1

    def certain_before_the_end(ids: list[int], model: str) -> list[float]:
        if len(ids) != last + 1 or ids[-1] == IDS[last]:
            return served[: len(ids)]
        return [*served[: len(ids) - 1], 0.0 if ids[-1] == IDS[last - 1] else -20.0]

    scripted_server.prompt_logprob = certain_before_the_end

    async def steps(delivery: AdapterDelivery) -> Any:
        await delivery.deliver("a", 1, folder(tmp_path, "v1"), canary(new, old))
        return [s.processed_logprobs for s in delivery.engine.pool.servers]  # type: ignore[attr-defined]

    assert deliver(scripted_server, steps) == [False]


def test_a_server_that_ignores_the_forced_token_is_no_proof(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0]["token_ids"] = [2]
        return answer

    scripted_server.edit = edit

    async def steps(delivery: AdapterDelivery) -> None:
        await delivery.deliver("a", 1, folder(tmp_path, "v1"), canary(new, old))

    with pytest.raises(ServerError, match=r"cannot score a sequence .*logit_bias"):
        deliver(scripted_server, steps)


def test_stale_weights_stop_the_run_with_both_numbers(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, old, ROUNDING))

    async def steps(delivery: AdapterDelivery) -> None:
        try:
            await delivery.deliver("lookup", 1, folder(tmp_path, "v1"), canary(new, old))
        finally:
            assert list(scripted_server.adapters) == ["lookup@v1"]
            await delivery.close()

    with pytest.raises(DeliveryError, match=r"does not run lookup@v1: .* by 0\.\d{4} and .* by 0\.0\d{3} nats rms"):
        deliver(scripted_server, steps)
    assert scripted_server.adapters == {}, "the version that failed its check is still served"


def test_a_doubtful_verdict_is_taken_again_from_many_tokens(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    """The few tokens that are scored first look like the old weights, the others like the new: no run stops."""
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    few = spread_indices(N)
    mixed = new.copy()
    mixed[few] = old[few]
    serve(scripted_server, lambda model: logprobs(2, mixed, 0.01))

    async def steps(delivery: AdapterDelivery) -> Any:
        return await delivery.deliver("lookup", 1, folder(tmp_path, "v1"), canary(new, old))

    report = deliver(scripted_server, steps)
    assert not report.canary.wrong and report.canary.error_new < report.canary.error_old
    asked = [len(body["prompt"]) for body in scripted_server.calls("/v1/completions")]
    assert len(asked) == 3 + SCORED_TOKENS + SURE_TOKENS


def test_one_stale_server_among_many_is_named(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, new, ROUNDING))
    with ScriptedServer() as other:
        serve(other, lambda model: logprobs(3, old, ROUNDING))

        async def run() -> None:
            engine = VllmEngine(f"{scripted_server.url},{other.url}", "scripted", [2], times=FAST)
            try:
                await AdapterDelivery(engine).deliver("a", 1, folder(tmp_path, "v1"), canary(new, old))
            finally:
                await engine.close()

        with pytest.raises(DeliveryError, match=other.url):
            asyncio.run(run())


def test_an_adapter_that_one_server_refuses_stays_on_none(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    with ScriptedServer(lora_enabled=False) as other:

        async def run() -> None:
            engine = VllmEngine(f"{scripted_server.url},{other.url}", "scripted", [2], times=FAST)
            try:
                await engine.load_adapter("a@v1", folder(tmp_path, "v1"))
            finally:
                await engine.close()

        with pytest.raises(InputError, match="--enable-lora"):
            asyncio.run(run())
        assert scripted_server.calls("/v1/load_lora_adapter") and scripted_server.adapters == {}


def test_server_that_dies_during_the_canary_is_left_out(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, new, ROUNDING))
    with ScriptedServer(fail="refuse", fail_paths=("/v1/completions", "/health")) as doomed:

        async def run() -> tuple[Any, int]:
            engine = VllmEngine(f"{scripted_server.url},{doomed.url}", "scripted", [2], times=FAST)
            try:
                report = await AdapterDelivery(engine).deliver("a", 1, folder(tmp_path, "v1"), canary(new, old))
                return report, len(engine.pool.alive)
            finally:
                await engine.close()

        report, alive = asyncio.run(run())
    assert report.canary.resolved and alive == 1


@pytest.mark.parametrize("judged", [True, False])
def test_a_doubtful_server_that_dies_before_the_second_look_is_left_out(
    scripted_server: ScriptedServer, tmp_path: Path, judged: bool
) -> None:
    """It has no verdict then, and loads the adapter anew when it returns: no run stops."""
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, new, ROUNDING))
    with ScriptedServer() as doomed:
        serve(doomed, lambda model: logprobs(3, old, ROUNDING))

        def edit(answer: dict[str, Any]) -> dict[str, Any]:
            if len(doomed.calls("/v1/completions")) >= SCORED_TOKENS:
                doomed.fail, doomed.fail_paths = "refuse", ("/v1/completions", "/health")
            return answer

        doomed.edit = edit

        async def run() -> tuple[Any, int]:
            engine = VllmEngine(f"{scripted_server.url},{doomed.url}", "scripted", [2], times=FAST)
            delivery = AdapterDelivery(engine)
            if not judged:  # the other is away while the check runs
                compare = delivery._compare

                async def only_doomed(e: Any, n: str, c: Canary, r: Any, servers: Any, tokens: int) -> Any:
                    return await compare(e, n, c, r, [s for s in servers if s.url == doomed.url], tokens)

                delivery._compare = only_doomed  # type: ignore[method-assign]
            try:
                return await delivery.deliver("a", 1, folder(tmp_path, "v1"), canary(new, old)), len(engine.pool.alive)
            finally:
                await engine.close()

        report, alive = asyncio.run(run())
    assert alive == 1
    assert (report.canary is not None) == judged
    assert not judged or (report.canary.resolved and not report.canary.wrong)


def test_adapter_stuck_at_an_old_version_is_found_once_small_steps_add_up(
    scripted_server: ScriptedServer, tmp_path: Path
) -> None:
    """Each step alone is below the rounding. The reference stays where it last was certain."""
    versions = [logprobs(0)]
    direction = np.random.default_rng(9).normal(size=N)
    for _ in range(30):
        versions.append(np.minimum(-0.01, versions[-1] + 0.015 * direction))
    assert not compare_canary(logprobs(5, versions[1], ROUNDING), versions[1], versions[0]).resolved
    serve(scripted_server, lambda model: logprobs(int(model.split("@v")[1]) + 100, versions[0], ROUNDING))

    async def steps(delivery: AdapterDelivery) -> int:
        for k in range(1, 31):
            try:
                await delivery.deliver("a", k, folder(tmp_path, f"v{k}"), canary(versions[k], versions[k - 1]))
            except DeliveryError:
                return k
        return 0

    assert 2 <= deliver(scripted_server, steps) <= 15


def test_healthy_small_steps_are_never_stopped(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    versions = [logprobs(0)]
    for k in range(30):
        versions.append(np.minimum(-0.01, logprobs(k + 50, versions[-1], 0.05)))
    rng = np.random.default_rng(4)
    serve(scripted_server, lambda model: versions[int(model.split("@v")[1])] + rng.normal(size=N) * ROUNDING)

    async def steps(delivery: AdapterDelivery) -> list[bool]:
        resolved = []
        for k in range(1, 31):
            report = await delivery.deliver("a", k, folder(tmp_path, f"v{k}"), canary(versions[k], versions[k - 1]))
            resolved.append(report.canary is not None and report.canary.resolved)
        return resolved

    assert any(deliver(scripted_server, steps))


def test_old_versions_are_unloaded_and_one_is_kept_for_stragglers(
    scripted_server: ScriptedServer, tmp_path: Path
) -> None:
    listed: list[set[str]] = []

    async def steps(delivery: AdapterDelivery) -> None:
        for k in range(1, 5):
            await delivery.deliver("a", k, folder(tmp_path, f"v{k}"))
            await asyncio.sleep(0.05)
            listed.append(set(scripted_server.adapters))
        await delivery.close()

    deliver(scripted_server, steps)
    assert listed == [{"a@v1"}, {"a@v1", "a@v2"}, {"a@v2", "a@v3"}, {"a@v3", "a@v4"}]
    assert scripted_server.adapters == {}


def test_capabilities_do_not_unload_each_other(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    async def steps(delivery: AdapterDelivery) -> set[str]:
        for capability in ("a", "b", "c"):
            for k in (1, 2, 3):
                await delivery.deliver(capability, k, folder(tmp_path, f"{capability}{k}"))
        await asyncio.sleep(0.1)
        return set(scripted_server.adapters)

    assert deliver(scripted_server, steps) == {f"{c}@v{k}" for c in "abc" for k in (2, 3)}


def test_replica_that_forgot_the_adapter_is_explained(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    """Several API processes behind one port: one took the adapter, the canary reached another."""
    plain = scripted_server._load

    async def forgets(request: Any) -> Any:
        response = await plain(request)
        scripted_server.adapters.clear()
        return response

    scripted_server.stop()
    scripted_server._load = forgets  # type: ignore[method-assign]
    scripted_server.start()
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)

    async def steps(delivery: AdapterDelivery) -> None:
        await delivery.deliver("a", 1, folder(tmp_path, "v1"), canary(new, old))

    with pytest.raises(InputError, match="--api-server-count 1"):
        deliver(scripted_server, steps)
