"""Adapter delivery: versioned names, unloading, and the canary that tells arrived weights from stale ones."""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import ScriptedServer

from pipeline.files import InputError, ServerError
from train import vllm_engine
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
from train.vllm_protocol import count_requests

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


@pytest.mark.parametrize("others", [0, 1])
def test_a_server_is_asked_for_single_tokens(scripted_server: ScriptedServer, tmp_path: Path, others: int) -> None:
    """Prompt log-probs beside turns would kill it, and an idle server can get turns of others at any moment."""
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, new if model == "lookup@v1" else old, ROUNDING))
    scripted_server.others_running = others

    async def steps(delivery: AdapterDelivery) -> Any:
        return await delivery.deliver("lookup", 1, folder(tmp_path, "v1"), canary(new, old))

    report = deliver(scripted_server, steps)
    assert report.canary.resolved and report.canary.error_new < report.canary.error_old
    bodies = scripted_server.calls("/v1/completions")
    asked = {len(b["prompt"]): b for b in bodies}
    assert len(bodies) == len(asked) == SCORED_TOKENS
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
    many = [asked[f"a@v{k}"] == SURE_TOKENS for k in range(1, 9)]
    assert many == [k % 4 == 3 for k in range(8)], "every fourth undecided delivery is judged by many tokens"


def test_prompt_log_probs_are_never_asked_of_a_server_that_samples(
    scripted_server: ScriptedServer, tmp_path: Path
) -> None:
    """Where log-probs are processed, forced tokens all have 0: the whole prompt is scored, when nothing else runs."""
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, new, ROUNDING))
    busy: list[int] = []

    def processed(token: int, body: dict[str, Any]) -> float:
        return -1.0 if body.get("temperature") == 2.0 else -0.5

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        if "prompt_logprobs" in choice:
            busy.append(scripted_server.in_flight)
        elif choice["token_ids"][0] in IDS:
            choice["logprobs"]["token_logprobs"] = [0.0]
        return answer

    scripted_server.logprob, scripted_server.edit, scripted_server.delay_s = processed, edit, 0.02

    async def steps(delivery: AdapterDelivery) -> Any:
        engine: Any = delivery.engine
        stop = asyncio.Event()

        async def turns(k: int) -> int:
            done = 0
            while not stop.is_set():
                done += len((await engine.sample([5, 6, k], SamplingParams(4))).token_ids)
            return done

        running = [asyncio.create_task(turns(k)) for k in range(4)]
        await asyncio.sleep(0.05)
        reports = await asyncio.gather(
            *(delivery.deliver(c, 1, folder(tmp_path, c), canary(new, old)) for c in ("a", "b"))
        )
        before = len(scripted_server.calls("/v1/completions"))
        await asyncio.sleep(0.1)
        assert len(scripted_server.calls("/v1/completions")) > before, "turns go on afterwards"
        stop.set()
        assert min(await asyncio.gather(*running)) > 0
        return reports

    for report in deliver(scripted_server, steps):
        assert report.canary.resolved and not report.canary.wrong
    assert busy == [0, 0]


def test_a_sure_policy_does_not_hide_that_log_probs_are_processed(
    scripted_server: ScriptedServer, tmp_path: Path
) -> None:
    """What follows the canary is certain at any temperature; forced tokens still all have 0."""
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    serve(scripted_server, lambda model: logprobs(2, new, ROUNDING))
    scripted_server.logprob = lambda token, body: -0.001 if body.get("temperature") == 2.0 else 0.0

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        choice = answer["choices"][0]
        if "prompt_logprobs" not in choice and choice["token_ids"] != [2]:
            choice["logprobs"]["token_logprobs"] = [0.0]
        return answer

    scripted_server.edit = edit

    async def steps(delivery: AdapterDelivery) -> Any:
        return await delivery.deliver("a", 1, folder(tmp_path, "v1"), canary(new, old))

    report = deliver(scripted_server, steps)
    assert report.canary.resolved and not report.canary.wrong
    whole = [body for body in scripted_server.calls("/v1/completions") if "prompt_logprobs" in body]
    assert len(whole) == 1 and len(scripted_server.calls("/v1/completions")) == 3


def test_one_certain_token_is_no_sign_of_processed_log_probs(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    served = [-1.0, *np.minimum(-0.001, logprobs(2, new, ROUNDING)).tolist()]

    def certain_at_the_end(ids: list[int], model: str) -> list[float]:
        return [*served[:-1], 0.0 if ids[-1] == IDS[-1] else -20.0]

    scripted_server.prompt_logprob = certain_at_the_end

    async def steps(delivery: AdapterDelivery) -> Any:
        return await delivery.deliver("a", 1, folder(tmp_path, "v1"), canary(new, old))

    deliver(scripted_server, steps)
    assert all("prompt_logprobs" not in body for body in scripted_server.calls("/v1/completions"))


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ("", None),
        ("vllm:num_requests_running 0.0\n", 0),
        ('# HELP x\nvllm:num_requests_running{engine="0",model_name="a b"} 3.0\n', 3),
        ('vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1e+02\n', 102),
        ('vllm:num_requests_waiting_by_reason{reason="capacity"} 7.0\nvllm:num_requests_running{engine="0"} 1.0\n', 1),
        ('vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 2.0\n', 3),
    ],
)
def test_requests_of_anybody_are_counted(metrics: str, expected: int | None) -> None:
    assert count_requests(metrics) == expected


def test_a_server_that_must_be_idle_and_never_is(
    scripted_server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processed log-probs, and another client whose turns never end: an error that names the remedy, no request."""
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)
    monkeypatch.setattr(vllm_engine, "IDLE_WAIT_S", 0.3)
    scripted_server.others_running = 1

    async def steps(delivery: AdapterDelivery) -> None:
        for server in delivery.engine.pool.alive:  # type: ignore[attr-defined]
            server.processed_logprobs = True
        await delivery.deliver("a", 1, folder(tmp_path, "v1"), canary(new, old))

    with pytest.raises(ServerError, match=r"others used it for 0\.3 s; start it with --logprobs-mode raw_logprobs"):
        deliver(scripted_server, steps)
    assert not scripted_server.calls("/v1/completions")


def test_a_server_that_ignores_the_forced_token_is_no_proof(scripted_server: ScriptedServer, tmp_path: Path) -> None:
    old, new = logprobs(0), logprobs(1, logprobs(0), 0.4)

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        answer["choices"][0]["token_ids"] = [2]
        return answer

    scripted_server.edit, scripted_server.others_running = edit, 1

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
    assert len(asked) == SCORED_TOKENS + SURE_TOKENS


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
