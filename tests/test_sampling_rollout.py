"""The episode driver and ``python -m train.collect_rollouts``: nothing lost or twice, nobody waits for a straggler."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_game
from conftest import ROOT
from scripted_engine import ScriptedEngine, right_answer
from scripted_server import ScriptedServer

from game_registry import AgentError, GameError, GameSpec
from pipeline.files import InputError, ServerError, read_json
from pipeline.ports import free_port
from pipeline.rollout_schema import load_rollouts
from train import collect_rollouts, rollout
from train.chat import ChatCodec
from train.engine import SamplingParams
from train.episode import Episode, EpisodeParams
from train.progress import EpisodeMeter
from train.rollout import Job, StuckEnvironmentError, WatchedGame, collect, jobs_of_group
from train.rollout_log import RolloutLog

PARAMS = EpisodeParams(max_seq_length=1024)


@pytest.fixture(scope="module")
def codec(smollm2: Path) -> ChatCodec:
    return ChatCodec.from_model(str(smollm2))


def run(engine: Any, codec: ChatCodec, jobs: list[Job], **options: Any) -> list[tuple[Job, Episode]]:
    found: list[tuple[Job, Episode]] = []
    options = {"params": PARAMS, "concurrency": 16, **options}
    params = options.pop("params")
    asyncio.run(
        collect(
            options.pop("spec", tiny_game.SPEC),
            engine,
            codec,
            jobs,
            params,
            on_episode=lambda job, episode: found.append((job, episode)),
            **options,
        )
    )
    return found


# ------------------------------------------------------------------ driver


def test_every_job_once_with_its_own_settings(codec: ChatCodec) -> None:
    greedy = EpisodeParams(max_seq_length=1024, temperature=0.0)
    jobs = [*jobs_of_group(3, 4, 0.5), Job(4, 0, adapter="a"), Job(5, 0, params=greedy)]
    engine = ScriptedEngine(codec, right_answer)
    found = run(engine, codec, jobs)
    assert sorted((j.seed, j.sample_idx) for j, _ in found) == sorted((j.seed, j.sample_idx) for j in jobs)
    assert all(e.reward == 1.0 and (e.seed, e.hinted) == (j.seed, j.hinted) for j, e in found)
    assert [j.hinted for j in jobs[:4]] == [True, True, False, False]
    assert {(a, p.temperature) for a, p in engine.asked} == {(None, 1.0), ("a", 1.0), (None, 0.0)}


def test_concurrency_is_used_and_bounded(codec: ChatCodec) -> None:
    engine = ScriptedEngine(codec, right_answer, delay_s=0.02)
    run(engine, codec, [Job(s) for s in range(40)], concurrency=8)
    assert engine.max_in_flight == 8


def test_straggler_holds_nobody_up(codec: ChatCodec) -> None:
    """Turns are not in lock-step: with one slow episode the rest run through at their own pace."""

    class Slow(ScriptedEngine):
        async def sample(self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None) -> Any:
            if "The number is 6." in self.codec.tokenizer.decode(prompt_ids):
                await asyncio.sleep(1.0)
            return await super().sample(prompt_ids, params, adapter)

    ended: list[tuple[int, float]] = []
    begin = time.monotonic()
    jobs = [Job(s) for s in (6, *range(6), *range(7, 13))]
    done = lambda job, episode: ended.append((job.seed, time.monotonic() - begin))  # noqa: E731
    asyncio.run(collect(tiny_game.SPEC, Slow(codec, right_answer), codec, jobs, PARAMS, concurrency=4, on_episode=done))
    assert ended[-1][0] == 6 and max(t for s, t in ended if s != 6) < 0.8


def test_deadline_and_broken_environment_are_outcomes_and_the_rest_goes_on(codec: ChatCodec) -> None:
    jobs = [Job(tiny_game.RAISES), Job(tiny_game.NAN_REWARD), Job(1), Job(2)]
    found = dict((j.seed, e) for j, e in run(ScriptedEngine(codec, right_answer), codec, jobs, concurrency=1))
    assert {s for s, e in found.items() if e.scored} == {1, 2}
    assert found[tiny_game.RAISES].result.finish_reason == "environment"


def test_stuck_environment_is_interrupted_and_counted(codec: ChatCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout.WatchedGame.__init__, "__defaults__", (0.2,))
    begin = time.monotonic()
    found = dict(
        (j.seed, e) for j, e in run(ScriptedEngine(codec, right_answer), codec, [Job(tiny_game.STUCK), Job(1)])
    )
    assert time.monotonic() - begin < 5
    assert found[1].reward == 1.0
    outcome = found[tiny_game.STUCK].result.outcome
    assert "StuckEnvironmentError: step did not return within 0.2 s" in str(outcome)


def test_watchdog_leaves_quick_calls_and_attributes_alone() -> None:
    game = WatchedGame(tiny_game.TinyGame(), 5.0)
    game.reset(3)
    assert game.max_steps == 3 and game.done is False and game.get_messages()
    assert not hasattr(game, "_finalize_with_verification")
    with pytest.raises(StuckEnvironmentError), rollout.interrupted_after(0.05, "block"):
        time.sleep(2)
    time.sleep(0.1)  # the timer is off again


def test_dead_server_stops_the_run_and_is_no_outcome(codec: ChatCodec) -> None:
    """A failed rollout that is really a dead server would make an environment look hard."""
    calls = 0

    def dies(prompt: str, params: SamplingParams) -> str:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise AgentError("server", "connection refused")
        return right_answer(prompt, params)

    found: list[Episode] = []
    jobs = [Job(s) for s in range(50)]
    with pytest.raises(ServerError, match="connection refused"):
        asyncio.run(
            collect(
                tiny_game.SPEC,
                ScriptedEngine(codec, dies, 0.001),
                codec,
                jobs,
                PARAMS,
                concurrency=4,
                on_episode=lambda job, episode: found.append(episode),
            )
        )
    assert len(found) <= 5 and all(e.scored for e in found) and calls < 15


def test_hanging_engine_ends_after_a_row_of_deadlines(codec: ChatCodec) -> None:
    engine = ScriptedEngine(codec, right_answer, delay_s=60)
    with pytest.raises(ServerError, match="16 episodes in a row"):
        run(engine, codec, [Job(s) for s in range(100)], params=EpisodeParams(deadline_s=0.02), concurrency=8)


def test_make_env_that_raises_is_named(codec: ChatCodec) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("no")

    with pytest.raises(GameError, match="make_env raised ZeroDivisionError"):
        run(ScriptedEngine(codec, right_answer), codec, [Job(1)], spec=GameSpec("broken", broken))


def test_environment_that_needs_a_user_says_which_flags(codec: ChatCodec) -> None:
    spec = GameSpec("asks_user", tiny_game.TinyGame, needs_user_llm=True)
    with pytest.raises(GameError, match="--user-llm-url"):
        run(ScriptedEngine(codec, right_answer), codec, [Job(1)], spec=spec)


# ------------------------------------------------------------------ log


def entry(seed: int, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"task_id": str(seed), "sample_idx": index, "outcome": "scored", "reward_info": {"reward": 0.5}, **more}


def test_log_resumes_after_a_kill_in_mid_line(tmp_path: Path) -> None:
    out = tmp_path / "f.json"
    log = RolloutLog(out, {"env": "a"})
    for seed in (10, 9):
        log.add(entry(seed))
    log.close()
    with open(log.partial, "a") as file:
        file.write('{"task_id": "11", "samp')
    again = RolloutLog(out, {"env": "a"})
    assert set(again.entries) == {("10", False, 0), ("9", False, 0)}
    again.add(entry(11))
    again.finish([("9", False, 0), ("10", False, 0), ("11", False, 0)], {"n": 3})
    data = read_json(out)
    assert [e["task_id"] for e in data["simulations"]] == ["9", "10", "11"] and not again.partial.exists()
    assert data["schema_version"] == 1 and data["info"]["settings"] == {"env": "a"}


@pytest.mark.parametrize("cut", [0, 5])
def test_log_killed_while_its_header_was_written(tmp_path: Path, cut: int) -> None:
    out = tmp_path / "f.json"
    (tmp_path / "f.json.partial.jsonl").write_text('{"header": {}}'[:cut])
    log = RolloutLog(out, {"env": "a"})
    log.add(entry(1))
    log.close()
    assert set(RolloutLog(out, {"env": "a"}).entries) == {("1", False, 0)}


def test_log_of_other_settings_is_refused_and_names_them(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "f.json", {"env": "a", "temperature": 1.0})
    log.add(entry(1))
    log.close()
    with pytest.raises(InputError, match=r"temperature = 1\.0, now it is 0\.5; use --no-resume"):
        RolloutLog(tmp_path / "f.json", {"env": "a", "temperature": 0.5})
    log = RolloutLog(tmp_path / "f.json", {"env": "a", "temperature": 0.5}, resume=False)
    assert log.entries == {}
    (tmp_path / "h.json.partial.jsonl").write_text('{"header": {"env": "typo"}}\n')
    assert RolloutLog(tmp_path / "h.json", {"env": "a"}).entries == {}, "nothing was sampled, so nothing is protected"
    (tmp_path / "g.json.partial.jsonl").write_text('{"rows": 1}\n')
    with pytest.raises(InputError, match="not a log of unfinished rollouts"):
        RolloutLog(tmp_path / "g.json", {})


def test_finished_file_is_extended_when_the_settings_are_the_same(tmp_path: Path) -> None:
    out = tmp_path / "f.json"
    log = RolloutLog(out, {"env": "a"})
    log.add(entry(1))
    log.finish([("1", False, 0)], {})
    assert set(RolloutLog(out, {"env": "a"}).entries) == {("1", False, 0)}
    assert RolloutLog(out, {"env": "b"}).entries == {}


def test_full_disk_is_one_line_and_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RolloutLog(tmp_path / "f.json", {})
    log.add(entry(1))

    def full(record: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log._log, "append", full)
    with pytest.raises(InputError, match=r"No space left on device.*free space and run again"):
        log.add(entry(2))
    assert set(RolloutLog(tmp_path / "f.json", {}).entries) == {("1", False, 0)}


# ------------------------------------------------------------------ progress


def test_progress_line_counts_what_matters(codec: ChatCodec) -> None:
    jobs = [Job(1), Job(2), Job(tiny_game.RAISES)]
    stream = io.StringIO()
    meter = EpisodeMeter("collect x", 10, 5, stream, every_s=0.0)
    for _, episode in run(ScriptedEngine(codec, right_answer), codec, jobs):
        meter.add(episode)
    line = stream.getvalue().splitlines()[-1]
    for part in (
        "8/10 episodes",
        "reward 1.000",
        "success 100.0%",
        "truncated 0.0%",
        "environment 1",
        "tokens/s",
        "left",
    ):
        assert part in line


# ------------------------------------------------------------------ command


def answer_server(codec: ChatCodec, **options: Any) -> ScriptedServer:
    def completion(ids: list[int], body: Any) -> list[int]:
        return [*codec._encode(right_answer(codec.tokenizer.decode(ids), SamplingParams(48))), codec.end_of_turn]

    return ScriptedServer(completion=completion, **options)


def command(monkeypatch: pytest.MonkeyPatch, smollm2: Path, out: Path, *flags: str) -> int:
    monkeypatch.setenv("VLLM_MODEL", "scripted")
    argv = ["collect", "--env", "capability_tiny", "--model", str(smollm2), "-o", str(out), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    return collect_rollouts.main()


def test_command_writes_a_file_that_calibration_reads(
    codec: ChatCodec, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"
    with answer_server(codec) as server:
        flags = ["--base-url", f"{server.url}/v1", "--num-seeds", "3", "--num-samples", "4", "--temperature", "1.0"]
        assert command(monkeypatch, smollm2, out, *flags, "--seed-start", "100", "--hint-ratio", "0.5", "--tokens") == 0
        assert len(server.calls("/v1/completions")) == 12
        assert command(monkeypatch, smollm2, out, *flags, "--seed-start", "100", "--hint-ratio", "0.5", "--tokens") == 0
        assert len(server.calls("/v1/completions")) == 12, "a finished file is not sampled again"
    rollouts = load_rollouts(out).rollouts
    assert [(r.task_id, r.sample_idx) for r in rollouts if r.hinted] == [
        (str(s), i) for s in (100, 101, 102) for i in (0, 1)
    ]
    assert len(rollouts) == 12 and all(r.reward == 1.0 for r in rollouts)
    first = read_json(out)["simulations"][0]
    assert len(first["token_ids"]) == len(first["action_mask"]) == len(first["logprobs"])
    assert first["tools"] and first["messages"][0]["role"] == "system"


def test_other_temperatures_need_exact_logprobs_only_where_they_are_written(
    codec: ChatCodec, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answer_server(codec) as server:
        flags = ["--base-url", server.url, "--num-seeds", "1", "--num-samples", "2", "--temperature", "0.7"]
        assert command(monkeypatch, smollm2, tmp_path / "plain.json", *flags) == 0
        with pytest.raises(InputError, match="processed_logprobs"):
            command(monkeypatch, smollm2, tmp_path / "tokens.json", *flags, "--tokens")


def test_command_with_dead_server_exits_2_and_goes_on_later(
    codec: ChatCodec, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"
    monkeypatch.setattr("train.engines.times_from_env", lambda env: _fast())
    with answer_server(codec) as server:
        flags = ["--base-url", server.url, "--num-seeds", "10", "--num-samples", "2", "--concurrency", "2"]
        plain = server.completion

        def dies(ids: list[int], body: Any) -> list[int]:
            if len(server.calls("/v1/completions")) > 9:
                server.fail, server.fail_paths = "refuse", ("/v1/completions", "/health")
            return plain(ids, body)

        server.completion = dies
        with pytest.raises(ServerError, match="no server answers"):
            command(monkeypatch, smollm2, out, *flags)
        partial = out.with_name("r.json.partial.jsonl")
        kept = partial.read_text().count("\n") - 1
        assert kept >= 8 and not out.exists()
        server.completion, server.fail = plain, None
        before = len(server.calls("/v1/completions"))
        assert command(monkeypatch, smollm2, out, *flags) == 0
        assert len(server.calls("/v1/completions")) - before == 20 - kept
    assert len(load_rollouts(out).rollouts) == 20 and not partial.exists()


def _fast() -> Any:
    from train.vllm_pool import PoolTimes

    return PoolTimes(request_s=2.0, probe_every_s=0.1, probe_timeout_s=0.3, patience_s=0.3, backoff_s=0.01)


def test_kill_9_at_any_moment_loses_and_repeats_nothing(codec: ChatCodec, smollm2: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    env = {**os.environ, "TRACE_GAME_MODULES": "tiny_game", "PYTHONPATH": str(ROOT / "tests"), "VLLM_MODEL": "scripted"}
    with answer_server(codec, delay_s=0.02) as server:
        argv = f"-m train.collect_rollouts --env capability_tiny --model {smollm2} --base-url {server.url} -o {out}"
        argv += " --num-seeds 20 --num-samples 4 --concurrency 4"
        child = subprocess.Popen([sys.executable, *argv.split()], cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
        partial = out.with_name("r.json.partial.jsonl")
        deadline = time.monotonic() + 60
        while not (partial.exists() and partial.read_text().count("\n") > 20):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        child.kill()
        child.wait()
        kept = {json.loads(line)["task_id"] for line in partial.read_text().splitlines()[1:-1]}
        before = len(server.calls("/v1/completions"))
        n_kept = partial.read_text().count("\n") - 1
        done = subprocess.run([sys.executable, *argv.split()], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(server.calls("/v1/completions")) - before == 80 - n_kept and kept
    keys = [(r.task_id, r.sample_idx) for r in load_rollouts(out).rollouts]
    assert sorted(keys) == sorted((str(s), i) for s in range(20) for i in range(4))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--num-seeds", "0"], "--num-seeds: expected >= 1"),
        (["--temperature", "nan"], "--temperature"),
        (["--temperature", "-1"], "--temperature"),
        (["--hint-ratio", "1.5"], "--hint-ratio"),
        (["--deadline-s", "0"], "--deadline-s"),
        (["--engine", "vllm"], "needs a server"),
        (["--engine", "local", "--base-url", "http://x:1"], "contradicts"),
        (["--base-url", "nonsense"], "expected http"),
        (["--chat-template-kwargs", "[1]"], "JSON object"),
        (["--adapter", "no/such/folder", "--base-url", "http://127.0.0.1:9"], "not found"),
        (["--adapter", "a=x,b=y", "--base-url", "http://127.0.0.1:9"], "expected one adapter"),
    ],
)
def test_bad_flags_are_one_line_before_anything_is_loaded(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: str
) -> None:
    for name in ("VLLM_BASE_URLS", "VLLM_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError) as caught:
        command(monkeypatch, smollm2, tmp_path / "r.json", *flags)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "r.json").exists()


def test_unknown_environment_and_absent_server_exit_2(smollm2: Path, tmp_path: Path) -> None:
    base = [sys.executable, "-m", "train.collect_rollouts", "--model", str(smollm2), "-o", str(tmp_path / "r.json")]
    cases = [
        (["--env", "capability_nothing"], "unknown game 'capability_nothing'"),
        (["--env", "capability_tiny", "--base-url", f"http://127.0.0.1:{free_port()}"], "no vLLM server answers"),
    ]
    env = {**os.environ, "TRACE_GAME_MODULES": "tiny_game", "PYTHONPATH": str(ROOT / "tests"), "VLLM_TIMEOUT_S": "5"}
    for flags, expected in cases:
        done = subprocess.run([*base, *flags], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 2 and expected in done.stderr
        assert done.stderr.strip().count("\n") == 0 and not (tmp_path / "r.json").exists()


def test_another_version_of_an_environment_or_of_an_adapter_is_another_fingerprint(tmp_path: Path) -> None:
    from pipeline.remote_game import resolve_game
    from train.identity import weights_digest
    from train.rollout_log import game_fingerprint

    source = (Path(__file__).parent / "tiny_game.py").read_text().replace("capability_tiny", "capability_print_test")
    file = tmp_path / "capability_print_test_game.py"
    file.write_text(source)
    first = game_fingerprint(resolve_game("capability_print_test", tmp_path))
    assert first == game_fingerprint(resolve_game("capability_print_test", tmp_path))
    file.write_text(source + "\n# another version\n")
    assert first != game_fingerprint(resolve_game("capability_print_test", tmp_path))
    desk = resolve_game("helpdesk")
    assert game_fingerprint(desk) == game_fingerprint(desk) and not game_fingerprint(desk).startswith("unknown")

    adapter = tmp_path / "a.safetensors"
    adapter.write_bytes(b"1")
    before = weights_digest([adapter])
    adapter.write_bytes(b"2")
    assert weights_digest([adapter]) != before
    with pytest.raises(InputError, match="not found"):
        weights_digest([tmp_path / "none"])


@pytest.mark.parametrize("line", ['{"x": 1}', "3", '{"task_id": "1", "sample_idx": true, "outcome": "scored"}'])
def test_a_damaged_log_of_the_same_settings_is_refused(tmp_path: Path, line: str) -> None:
    from train.rollout_log import RolloutLog

    output = tmp_path / "r.json"
    partial = output.with_name("r.json.partial.jsonl")
    partial.write_text(json.dumps({"header": {"a": 1}}) + f"\n{line}\n")
    with pytest.raises(InputError, match="line 2: damaged entry"):
        RolloutLog(output, {"a": 1})
    partial.unlink()
    for simulations in ([json.loads(line)], None):
        output.write_text(json.dumps({"info": {"settings": {"a": 1}}, "simulations": simulations}))
        with pytest.raises(InputError, match=r"damaged entry|has no simulations"):
            RolloutLog(output, {"a": 1})
