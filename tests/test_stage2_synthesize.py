"""Synthesis end to end against a scripted model server: what is kept, what is not, what survives a dead server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer
from stage2_helpers import FIELDS, ISOLATION, MODULE, scenario

from game_registry import AgentError
from pipeline import swe_game
from pipeline import synthesize_scenarios as synthesis
from pipeline.files import InputError, JsonlLog, ServerError
from pipeline.scenarios import load_scenarios, save_scenarios, static_problems
from pipeline.swe_game import oracle_text, scenario_spec
from pipeline.swe_grading import Grade, self_test
from pipeline.synthesis_log import read_log
from pipeline.synthesize_scenarios import main
from pipeline.text_client import Sampling, TextClient, text_agent

Body = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]


class Model:
    """Writes the given answers in turn (the last again and again), and solves each sample at the given rate."""

    def __init__(self, answers: list[str], rates: list[float], rollouts: int = 4) -> None:
        self.answers, self.rates, self.rollouts = answers, rates, rollouts
        self.written = self.solved = 0
        self.requests: list[str] = []

    def __call__(self, messages: list[Body], body: Body) -> str | Body:
        if "repair Python modules" not in messages[0]["content"]:
            self.requests.append(messages[-1]["content"])
            self.written += 1
            return self.answers[min(self.written, len(self.answers)) - 1]
        sample, number = divmod(self.solved, self.rollouts)
        self.solved += 1
        if number < self.rates[min(sample, len(self.rates) - 1)] * self.rollouts:
            return self._solution(messages[1]["content"])
        return "<<<<<<< SEARCH\ndef fee(\n=======\ndef  fee(\n>>>>>>> REPLACE"  # edits, and repairs nothing

    def _solution(self, task: str) -> str:
        line = next(text for text in task.splitlines() if text.endswith(" = 2"))
        return f"<<<<<<< SEARCH\n{line}\n=======\n{line[:-1]}3\n>>>>>>> REPLACE"


def answer(**changes: Any) -> str:
    return f"```json\n{json.dumps({**FIELDS, **changes})}\n```"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios judged by their text and modules by a rule, for tests about the loop alone."""

    def judged(one: Any, *_: Any) -> list[str]:
        problems = static_problems(one)
        return problems or ([] if "= 3" in one.oracle_replace else ["after the oracle edit test_target does not pass"])

    monkeypatch.setattr(synthesis, "self_test", judged)
    monkeypatch.setattr(
        swe_game, "grade", lambda one, code, **_: Grade({"x": "passed"} if "= 3" in code else {}, {}, 0.0)
    )
    monkeypatch.setattr(swe_game, "reward", lambda one, result, isolation: float(result.passed("x")))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def run(server: ScriptedServer, model: Model, output: Path, *flags: str) -> int:
    server.chat = model  # type: ignore[assignment]
    common = ["--capability", "exact_arithmetic", "--base-url", server.url, "--model", "scripted", "-o", str(output)]
    return main([*common, "--rollouts", str(model.rollouts), "--retries", "0", "--isolation", ISOLATION.kind, *flags])


def log_of(output: Path) -> list[Body]:
    return [json.loads(line) for line in output.with_name(f"{output.stem}.attempts.jsonl").read_text().splitlines()]


def test_a_sound_scenario_that_is_solved_sometimes_is_accepted(server: ScriptedServer, tmp_path: Path) -> None:
    output, model = tmp_path / "s.json", Model([answer()], [0.5, 0.25])
    assert run(server, model, output, "--accept", "1") == 0
    (accepted,) = load_scenarios(output)
    assert (accepted.name, accepted.pass_rate, accepted.n_rollouts) == ("fee_rate", 0.25, 4), (
        "the rate of the fresh sample"
    )
    assert accepted.sampling == {"model": "scripted", "temperature": 1.0, "max_tokens": 2048}
    (record,) = log_of(output)
    assert [m["sample"] for m in record["measured"]] == ["first", "fresh"]
    assert [m["pass_rate"] for m in record["measured"]] == [0.5, 0.25]
    assert "exact_arithmetic" in model.requests[0] and "billing" in model.requests[0]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("rates", "outcome", "samples"),
    [([0.0], "unsolved", 1), ([0.5, 0.0], "unconfirmed", 2), ([0.5, 0.75], "unconfirmed", 2)],
)
def test_each_sample_is_drawn_once(
    server: ScriptedServer, tmp_path: Path, rates: list[float], outcome: str, samples: int
) -> None:
    """No optional stopping: a scenario outside the band is not measured again until it fits."""
    output, model = tmp_path / "s.json", Model([answer()], [*rates, 0.25])
    assert run(server, model, output, "--max-tries", "1") == 1
    (record,) = log_of(output)
    assert record["outcome"] == outcome and len(record["measured"]) == samples
    assert model.solved == samples * 4 and not output.exists()


def test_too_easy_is_mutated(server: ScriptedServer, tmp_path: Path) -> None:
    output, model = tmp_path / "s.json", Model([answer()], [1.0, 0.5, 0.5])
    assert run(server, model, output, "--accept", "1") == 0
    (record,) = log_of(output)
    assert len(record["mutations"]) == 1 and [m["pass_rate"] for m in record["measured"]] == [1.0, 0.5, 0.5]
    assert load_scenarios(output)[0].name == "fee_rate_mut1"


@pytest.mark.usefixtures("quick")
def test_too_easy_without_mutations(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    assert run(server, Model([answer()], [1.0]), output, "--mutations", "0", "--max-tries", "1") == 1
    assert log_of(output)[0]["outcome"] == "too_easy"


@pytest.mark.usefixtures("quick")
def test_a_faulty_answer_is_revised_with_the_reasons(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    model = Model(["I would rather not.", answer(oracle_replace="    rate = 9"), answer()], [0.25])
    assert run(server, model, output, "--accept", "1") == 0
    (record,) = log_of(output)
    assert record["revisions"] == 2 and record["problems"] == []
    assert "no JSON object" in model.requests[1] and "after the oracle edit" in model.requests[2]


@pytest.mark.usefixtures("quick")
def test_at_most_two_revisions(server: ScriptedServer, tmp_path: Path) -> None:
    output, model = tmp_path / "s.json", Model(["no"], [0.25])
    assert run(server, model, output, "--max-tries", "2") == 1
    assert model.written == 6 and [r["outcome"] for r in log_of(output)] == ["unparsed", "unparsed"]
    assert model.solved == 0


def test_a_cut_answer_is_named_as_such(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    server.edit = lambda response: {
        **response,
        "choices": [{**response["choices"][0], "finish_reason": "length"}],
    }
    assert run(server, Model([answer()], [0.25]), output, "--max-tries", "1") == 1
    assert "cut at the token limit" in log_of(output)[0]["problems"][0]


@pytest.mark.usefixtures("quick")
def test_names_are_taken_once_and_hand_written_scenarios_stay(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    save_scenarios(output, [scenario()])
    model = Model([answer(), answer(name="another_name")], [0.25])
    assert run(server, model, output, "--accept", "1") == 0
    assert [s.name for s in load_scenarios(output)] == ["fee_rate", "another_name"]
    assert "the name fee_rate is taken" in model.requests[1] and "- fee_rate" in model.requests[0]


@pytest.mark.usefixtures("quick")
def test_resumes_where_it_stopped(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    assert run(server, Model(["no"], [0.0]), output, "--max-tries", "1") == 1
    log = output.with_name("s.attempts.jsonl")
    log.write_text(log.read_text() + '{"index": 1, "outc')  # killed in the middle of a line
    model = Model([answer()], [0.25])
    assert run(server, model, output, "--accept", "1") == 0
    assert [r["index"] for r in log_of(output)] == [0, 1] and model.written == 1
    output.unlink()  # killed between log and file
    assert run(server, model, output, "--accept", "1") == 0 and model.written == 1
    assert load_scenarios(output)[0].name == "fee_rate"


@pytest.mark.usefixtures("quick")
def test_a_dead_server_is_no_failed_rollout(server: ScriptedServer, tmp_path: Path) -> None:
    output, model = tmp_path / "s.json", Model([answer()], [0.25])

    def dies(messages: list[Body], body: Body) -> Any:
        if model.solved == 2:
            server.fail = "refuse"
        return model(messages, body)

    server.chat = dies
    common = ["--capability", "c_c", "--base-url", server.url, "--model", "scripted", "-o", str(output)]
    with pytest.raises(ServerError, match="rollout"):
        main([*common, "--rollouts", "4", "--retries", "0", "--isolation", ISOLATION.kind, "--concurrency", "1"])
    assert log_of(output) == [] and not output.exists()


@pytest.mark.parametrize("mode", ["500", "garbage", "die_midway", "refuse"])
def test_server_faults_are_retried_then_typed(server: ScriptedServer, tmp_path: Path, mode: str) -> None:
    server.fail = mode
    with pytest.raises(ServerError, match="attempts"):
        run(server, Model([answer()], [0.25]), tmp_path / "s.json")


async def test_a_fault_that_passes_is_retried(server: ScriptedServer) -> None:
    server.fail, server.fail_times = "503", 1
    endpoint = synthesis.Endpoint(server.url, "scripted", retries=2)
    async with TextClient(endpoint) as client:
        completion = await client.complete([{"role": "user", "content": "x"}], Sampling(1.0, 8), 0)
    assert completion.text == "ok" and len(server.calls("/v1/chat/completions")) == 2


async def test_an_unknown_key_is_not_retried(server: ScriptedServer) -> None:
    server.api_key = "right"
    async with TextClient(synthesis.Endpoint(server.url, "scripted", api_key="wrong", retries=5)) as client:
        with pytest.raises(ServerError, match="HTTP 401"):
            await client.complete([{"role": "user", "content": "x"}], Sampling(1.0, 8), 0)
    assert len(server.requests) == 1


async def test_the_agent_types_a_dead_server(server: ScriptedServer) -> None:
    from game_registry import Turn

    server.fail = "refuse"
    async with TextClient(synthesis.Endpoint(server.url, "scripted", retries=0)) as client:
        agent = text_agent(client, Sampling(1.0, 8), 0)
        with pytest.raises(AgentError) as caught:
            await agent(Turn(0, [{"role": "user", "content": "x"}], [], []))
    assert caught.value.kind == "server"


def test_bad_input(tmp_path: Path) -> None:
    flags = ["--capability", "c_c", "--base-url", "http://127.0.0.1:1", "--model", "m", "--isolation", ISOLATION.kind]
    with pytest.raises(InputError, match="--max-pass-rate"):
        main([*flags, "--max-pass-rate", "0"])
    selection = tmp_path / "selected.json"
    selection.write_text('[{"skill": "other", "description": "d"}]')
    with pytest.raises(InputError, match=r"no skill 'c_c'; it has other"):
        main([*flags, "--capabilities-file", str(selection)])
    (tmp_path / "s.attempts.jsonl").write_text('{"index": 5}\n')
    with pytest.raises(InputError, match="expected try 0"):
        read_log(tmp_path / "s.attempts.jsonl")


def test_the_description_comes_from_the_selection(tmp_path: Path) -> None:
    selection = tmp_path / "selected.json"
    selection.write_text('[{"skill": "c_c", "description": "Counts exactly."}]')
    assert synthesis._description("c_c", str(selection)) == "Counts exactly."
    assert synthesis._description("c_c", None) == "c c"


def test_the_oracle_text_solves_the_game() -> None:
    from game_registry import Scored, play_sync, scripted_agent

    spec = scenario_spec("capability_x", [scenario()], ISOLATION.kind)
    said = {"name": "respond_to_user", "arguments": {"message": oracle_text(scenario())}}
    assert play_sync(spec, spec.make_env(), scripted_agent([said]), 0).outcome == Scored(1.0)


@pytest.mark.usefixtures("quick")
def test_given_candidates_are_measured_in_place_of_written_ones(server: ScriptedServer, tmp_path: Path) -> None:
    given, output = tmp_path / "candidates.json", tmp_path / "s.json"
    save_scenarios(
        given, [scenario(oracle_replace="    rate = 9"), scenario(name="good_one"), scenario(name="hard_one")]
    )
    model = Model([], [0.5, 0.25, 0.0])
    assert run(server, model, output, "--candidates", str(given)) == 1, "one of ten is accepted"
    assert model.written == 0 and [r["outcome"] for r in log_of(output)] == ["unsound", "accepted", "unsolved"]
    assert [(s.name, s.pass_rate) for s in load_scenarios(output)] == [("good_one", 0.25)]
    with pytest.raises(InputError, match="another file"):
        run(server, model, given, "--candidates", str(given))


# --------------------------------------------------------------------------- what is remembered, and by whom


@pytest.mark.usefixtures("quick")
def test_every_answer_is_logged_with_its_settings(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "s.json"
    model = Model(["I would rather not \ud83d.", answer(oracle_replace="    rate = 9"), answer(), "no"], [0.25])
    assert run(server, model, output, "--max-tries", "2", "--seed", "3", "--temperature", "0.7") == 1
    first, second = log_of(output)
    assert [a["finish_reason"] for a in first["answers"]] == ["stop"] * 3 and first["outcome"] == "accepted"
    assert first["answers"][0]["text"] == "I would rather not ?.", "half a character is no reason to stop"
    assert [bool(a["problems"]) for a in first["answers"]] == [True, True, False]
    assert len({a["seed"] for a in [*first["answers"], *second["answers"]]}) == 6
    assert first["settings"]["writer"] == {"model": "scripted", "temperature": 0.7, "max_tokens": 8192}
    assert first["settings"]["solver"]["max_tokens"] == 2048 and first["settings"]["seed"] == 3
    said = capsys.readouterr().out
    assert "1 accepted in 2 tries" in said and "1 unparsed" in said and "1 x the answer holds no JSON object" in said


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("flags", [("--rollouts", "8"), ("--max-pass-rate", "0.9"), ("--solve-max-tokens", "9")])
def test_a_log_of_other_settings_is_not_gone_on_with(
    server: ScriptedServer, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    output = tmp_path / "s.json"
    run(server, Model(["no"], [0.0]), output, "--max-tries", "1")
    with pytest.raises(InputError, match="this run has"):
        run(server, Model(["no"], [0.0]), output, *flags)
    assert run(server, Model(["no"], [0.0]), output, "--max-tries", "2", "--write-max-tokens", "99") == 1
    assert len(log_of(output)) == 2, "how scenarios are written may change"


@pytest.mark.parametrize(
    "line",
    ['{"index": 0}', "[]", "7", '{"index": 0, "outcome": "accepted"}', '{"index": 0, "outcome": "won"}', "\ud800", "{"],
)
def test_damaged_logs_are_one_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "s.attempts.jsonl").write_bytes(line.encode("utf-8", "surrogatepass") + b"\n")
    with pytest.raises(InputError):
        read_log(tmp_path / "s.attempts.jsonl")


@pytest.mark.usefixtures("quick")
def test_two_at_once_are_refused(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    model = Model(["no"], [0.0])
    with JsonlLog(output.with_name("s.attempts.jsonl")), pytest.raises(InputError, match="another process"):
        run(server, model, output)
    assert model.written == 0 and run(server, model, output, "--max-tries", "1") == 1, "the lock ends with its holder"


# --------------------------------------------------------------------------- contexts that are full


@pytest.mark.usefixtures("quick")
def test_no_room_for_a_revision_ends_the_try_and_not_the_run(server: ScriptedServer, tmp_path: Path) -> None:
    output, model = tmp_path / "s.json", Model(["no"], [0.0])
    server.refuse_chat = lambda messages: len(messages) > 1
    assert run(server, model, output, "--max-tries", "2") == 1
    records = log_of(output)
    assert [len(r["answers"]) for r in records] == [1, 1] and records[0]["outcome"] == "unparsed"
    assert "no room for a revision" in records[0]["problems"][-1]


@pytest.mark.usefixtures("quick")
def test_no_room_at_all_says_what_to_change(server: ScriptedServer, tmp_path: Path) -> None:
    server.refuse_chat = lambda messages: True
    with pytest.raises(InputError, match="lower --write-max-tokens"):
        run(server, Model(["no"], [0.0]), tmp_path / "s.json")


@pytest.mark.usefixtures("quick")
def test_no_room_to_solve_is_not_called_hard(server: ScriptedServer, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    server.refuse_chat = lambda messages: "repair Python modules" in messages[0]["content"]
    assert run(server, Model([answer()], [0.25]), output, "--max-tries", "1") == 1
    (record,) = log_of(output)
    assert record["outcome"] == "unsound" and "no room for an answer of 2048 tokens" in record["problems"][0]


# --------------------------------------------------------------------------- kill -9, full disks


def command(server: ScriptedServer, output: Path, *flags: str) -> list[str]:
    common = ["--capability", "c_c", "--base-url", server.url, "--model", "scripted", "-o", str(output)]
    return [sys.executable, "-m", "pipeline.synthesize_scenarios", *common, "--retries", "0", *flags]


def test_kill_9_loses_one_try_and_repeats_none(server: ScriptedServer, tmp_path: Path) -> None:
    output, model = tmp_path / "s.json", Model(["no"], [0.0])
    flags = ("--max-tries", "6", "--isolation", ISOLATION.kind, "--revisions", "0")

    def slow(messages: list[Body], body: Body) -> Any:
        time.sleep(0.02 if model.written < 3 else 5 if model.written == 3 else 0)
        return model(messages, body)

    server.chat = slow
    first = subprocess.Popen(command(server, output, *flags), cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    log = output.with_name("s.attempts.jsonl")
    while not (log.exists() and log.read_bytes().count(b"\n") == 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    model.written = 4
    second = subprocess.run(command(server, output, *flags), cwd=ROOT, capture_output=True, text=True, check=False)
    assert second.returncode == 1, second.stderr
    assert [r["index"] for r in log_of(output)] == list(range(6)) and "0 accepted in 6 tries" in second.stdout
    seeds = [a["seed"] for r in log_of(output) for a in r["answers"]]
    assert len(set(seeds)) == 6, "a try that is made again after the kill asks with its own seed"


def test_a_full_disk_is_one_line(server: ScriptedServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.attempts.jsonl").symlink_to("/dev/full")
    with pytest.raises(InputError, match="cannot be written"):
        run(server, Model(["no"], [0.0]), tmp_path / "s.json")


# --------------------------------------------------------------------------- scenarios that do harm


@pytest.mark.skipif(ISOLATION.kind != "bwrap", reason="attack code is run behind bwrap only")
@pytest.mark.parametrize(
    "changes",
    [
        {"module_code": "import os\nos._exit(0)\n" + FIELDS["module_code"]},
        {"module_code": "import sys\nsys.exit(0)\n" + FIELDS["module_code"]},
        {"test_code": "import os\nos._exit(0)\n" + FIELDS["test_code"]},
        {"test_code": FIELDS["test_code"] + "\n\ndef test_last():\n    import os\n    os._exit(0)\n"},
        {"test_code": "import os\nos.write(1, b'{\"nodes\": {}}')\n" + FIELDS["test_code"].replace("== 30", "== 20")},
        {"test_code": "print('x' * (3 << 20))\n" + FIELDS["test_code"].replace("== 30", "== 20")},
        {"module_code": "import os\nos.symlink('/etc/passwd', 'fees.py')\nx = [bytearray(1 << 30)] * 9\n" + MODULE},
        {"module_code": "import os\nwhile os.fork():\n    pass\n" + FIELDS["module_code"]},
    ],
    ids=["module _exit", "module exit", "tests _exit", "late _exit", "forged", "flood", "memory", "forks"],
)
def test_a_scenario_that_does_harm_is_unsound(changes: dict[str, str]) -> None:
    problems = self_test(scenario(**changes), ISOLATION)
    assert problems and all(isinstance(p, str) for p in problems)
