"""Environments in sandboxed workers: the same episodes as in this process, and typed outcomes when a worker is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from environment_files import GOOD, Change, changed_in

from game_registry import _REGISTRY as registry
from game_registry import (
    AgentError,
    Failed,
    GameError,
    Reply,
    Scored,
    Turn,
    load_game_file,
    play,
    play_sync,
    scripted_agent,
)
from pipeline import remote_worker, sandbox
from pipeline.files import InputError
from pipeline.panel_policies import random_calls
from pipeline.remote_game import EnvironmentFault, RemoteGame, SandboxedEnvironment, sandboxed_spec

ROOT = Path(__file__).resolve().parents[1]
ISOLATION = "bwrap" if sandbox._probe_bwrap()[0] is not None else "process"



@pytest.fixture
def changed(tmp_path: Path) -> Change:
    """The good environment with one text replaced."""
    return changed_in(tmp_path)


@pytest.fixture(scope="module")
def ledger() -> Iterator[SandboxedEnvironment]:
    with SandboxedEnvironment(GOOD, isolation=ISOLATION, workers=2) as environment:
        yield environment


STEP = "        self.steps += 1\n"
RESET = "        self.task = make_task(seed)\n"
CRASH = (
    STEP,
    STEP + '        if "crash" in action_json:\n            import os\n\n            os.kill(os.getpid(), 9)\n',
)
HANG = (STEP, STEP + '        while "hang" in action_json:\n            pass\n')


def say(env: RemoteGame, text: str) -> None:
    env.step(json.dumps({"name": "respond_to_user", "arguments": {"message": text}}))


# --------------------------------------------------------------------------- the same game


def test_spec_has_the_metadata_and_no_code() -> None:
    before = set(sys.modules)
    with SandboxedEnvironment(GOOD, isolation=ISOLATION) as environment:
        spec = environment.spec
    assert (spec.name, spec.max_gen_tokens, spec.tools_in) == ("capability_ledger", 128, "chat_template")
    assert spec.hint_prompt and spec.description and spec.extract_action is None and not spec.needs_user_llm
    new = [sys.modules[name] for name in set(sys.modules) - before]
    assert not any(str(GOOD) in str(getattr(module, "__file__", "")) for module in new), "another test may import it"


def test_the_same_episodes_as_in_this_process(ledger: SandboxedEnvironment) -> None:
    registry.pop("capability_ledger", None)
    load_game_file(GOOD)
    local = registry.pop("capability_ledger")
    assert local.oracle is not None and ledger.spec.oracle is not None
    for seed in range(20):
        assert list(local.oracle(seed)) == list(ledger.spec.oracle(seed))
        for make in (random_calls, lambda s: scripted_agent(local.oracle(s))):  # type: ignore[misc]
            here = play_sync(local, local.make_env(), make(seed), seed)
            there = play_sync(ledger.spec, ledger.spec.make_env(), make(seed), seed)
            assert here == there


def test_many_episodes_at_once(ledger: SandboxedEnvironment) -> None:
    spec = ledger.spec
    assert spec.oracle is not None

    async def slow_oracle(seed: int) -> Any:
        inner = scripted_agent(spec.oracle(seed))  # type: ignore[misc]

        async def agent(turn: Turn) -> Reply:
            await asyncio.sleep(0.001 * (seed % 7))
            return await inner(turn)

        return await play(spec, spec.make_env(), agent, seed)

    async def everything() -> list[Any]:
        return list(await asyncio.gather(*(slow_oracle(seed) for seed in range(60))))

    assert [r.outcome for r in asyncio.run(everything())] == [Scored(1.0)] * 60


def test_threads_share_a_worker(ledger: SandboxedEnvironment) -> None:
    outcomes: list[Any] = []

    def work(start: int) -> None:
        for seed in range(start, start + 10):
            agent = scripted_agent(ledger.spec.oracle(seed))  # type: ignore[misc]
            outcomes.append(play_sync(ledger.spec, ledger.spec.make_env(), agent, seed).outcome)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [Scored(1.0)] * 60


def test_dropped_environments_are_forgotten(ledger: SandboxedEnvironment) -> None:
    for _ in range(50):
        ledger.spec.make_env().reset(0)
    gc.collect()
    kept = ledger.spec.make_env()
    kept.reset(1)
    assert sum(len(w.dropped) for w in ledger._workers) < 50
    assert kept.get_messages()


def test_a_registered_name_is_found_inside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ledger_module.py").write_text(GOOD.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRACE_GAME_MODULES", "ledger_module")
    with SandboxedEnvironment("capability_ledger", isolation=ISOLATION) as environment:
        assert environment.files() == [tmp_path / "ledger_module.py"]
        assert "ledger_module" not in sys.modules, "the module was never imported here"
        env = environment.spec.make_env()
        env.reset(1)
        assert "Close the record" in str(env.get_messages()[-1]["content"])


def test_sandboxed_spec_is_all_that_a_trainer_needs() -> None:
    spec = sandboxed_spec(GOOD, isolation=ISOLATION)
    assert spec.oracle is not None
    assert play_sync(spec, spec.make_env(), scripted_agent(spec.oracle(5)), 5).outcome == Scored(1.0)


def test_final_verification_runs_once_per_episode(changed: Change) -> None:
    method = (
        "    def _finalize_with_verification(self) -> None:\n        self.steps += 100\n\n    def get_summary(self)"
    )
    with SandboxedEnvironment(changed(("    def get_summary(self)", method)), isolation=ISOLATION) as environment:
        env = environment.spec.make_env()
        for _ in range(2):
            env.reset(0)
            assert [env.get_summary()["steps"] for _ in range(3)] == [100, 100, 100]


def test_an_extractor_runs_inside(changed: Change) -> None:
    replacement = (
        'extract_action=lambda text: text.split("ACT:")[1] if "ACT:" in text else None,\n        oracle=oracle,'
    )
    with SandboxedEnvironment(changed(("oracle=oracle,", replacement)), isolation=ISOLATION) as environment:
        extract = environment.spec.extract_action
        assert extract is not None and extract("so ACT:{}") == "{}" and extract("nothing") is None


def test_an_environment_that_prints_does_not_break_the_protocol(changed: Change) -> None:
    noise = STEP + '        print("{\\"ok\\": {}}" * 100)\n        import os\n\n        os.write(1, b"noise" * 9999)\n'
    with SandboxedEnvironment(changed((STEP, noise)), isolation=ISOLATION) as environment:
        spec = environment.spec
        assert spec.oracle is not None
        assert play_sync(spec, spec.make_env(), scripted_agent(spec.oracle(2)), 2).outcome == Scored(1.0)


# --------------------------------------------------------------------------- the user simulator


USER = (
    (
        "    max_steps = 5\n",
        "    max_steps = 5\n\n    def __init__(self, user_llm):\n        self.user_llm = user_llm\n",
    ),
    ('"user", "Please do it with the tools.")', '"user", self.user_llm(self.messages))'),
    ("        max_gen_tokens=128,\n", "        max_gen_tokens=128,\n        needs_user_llm=True,\n"),
)


def test_a_user_simulator_is_asked_outside(changed: Change) -> None:
    with SandboxedEnvironment(changed(*USER), isolation=ISOLATION) as environment:
        env = environment.spec.make_env(user_llm=lambda messages: f"I saw {len(messages)} messages")
        env.reset(0)
        say(env, "Who are you?")
        assert env.get_messages()[-1] == {"role": "user", "content": "I saw 1 messages"}


def test_a_dead_user_simulator_is_not_the_policys_fault(changed: Change) -> None:
    def dead(messages: Any) -> str:
        raise AgentError("server", "connection refused")

    with SandboxedEnvironment(changed(*USER), isolation=ISOLATION) as environment:
        spec = environment.spec
        result = play_sync(spec, spec.make_env(user_llm=dead), random_text, 0)
        assert result.outcome == Failed("server", "connection refused")
        again = play_sync(spec, spec.make_env(user_llm=lambda m: "go on"), random_text, 0)
        assert isinstance(again.outcome, Scored)


async def random_text(turn: Turn) -> Reply:
    return Reply(text="hello")


# --------------------------------------------------------------------------- faults


def test_what_the_environment_raises_is_its_fault(changed: Change) -> None:
    file = changed((RESET, RESET + '        if seed == 3:\n            raise KeyError("no row")\n'))
    with SandboxedEnvironment(file, isolation=ISOLATION) as environment:
        spec = environment.spec
        result = play_sync(spec, spec.make_env(), random_text, 3)
        assert isinstance(result.outcome, Failed) and result.outcome.kind == "environment"
        assert "KeyError" in result.outcome.detail and "no row" in result.outcome.detail
        assert isinstance(play_sync(spec, spec.make_env(), random_text, 4).outcome, Scored), "the worker lives on"
        assert environment.restarts == 0


@pytest.mark.parametrize(
    ("fault", "word", "said"), [(CRASH, "crash", "it ended during step"), (HANG, "hang", "longer than")]
)
def test_crash_and_hang_are_typed_and_followed_by_a_fresh_worker(
    changed: Change, fault: tuple[str, str], word: str, said: str
) -> None:
    with SandboxedEnvironment(changed(fault), isolation=ISOLATION, step_timeout_s=0.5) as environment:
        spec = environment.spec
        bystander = spec.make_env()
        bystander.reset(9)

        async def culprit(turn: Turn) -> Reply:
            return Reply(text=word)

        result = play_sync(spec, spec.make_env(), culprit, 0)
        assert isinstance(result.outcome, Failed) and result.outcome.kind == "environment"
        assert said in result.outcome.detail
        with pytest.raises(AgentError) as caught:
            say(bystander, "hello")
        assert caught.value.kind == "worker", "another episode's crash is not this environment's fault"
        assert isinstance(play_sync(spec, bystander, random_text, 9).outcome, Scored), "reset finds a fresh worker"
        assert environment.restarts == 1


def test_a_flood_of_output_is_a_fault(changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_worker, "MAX_LINE_BYTES", 1 << 20)
    file = changed(('"user", "Please do it with the tools.")', '"user", "x" * (3 << 20))'))
    with SandboxedEnvironment(file, isolation=ISOLATION) as environment:
        result = play_sync(environment.spec, environment.spec.make_env(), random_text, 0)
        assert isinstance(result.outcome, Failed) and "more than 1 MiB" in result.outcome.detail


def test_memory_is_limited(changed: Change) -> None:
    file = changed((STEP, STEP + "        self.hoard = bytearray(900 << 20)\n"))
    limits = sandbox.Limits(cpu_s=None, memory_mb=512)
    with SandboxedEnvironment(file, isolation=ISOLATION, limits=limits) as environment:
        result = play_sync(environment.spec, environment.spec.make_env(), random_text, 0)
        assert isinstance(result.outcome, Failed) and "MemoryError" in result.outcome.detail


@pytest.mark.parametrize(
    ("reply", "said"),
    [(b"not json\n", "no JSON"), (b"[1]\n", "returned"), (b'{"verdict": 1}\n', "returned"), (b"", "ended")],
)
def test_nonsense_on_the_pipe_is_a_fault(changed: Change, reply: bytes, said: str) -> None:
    """An environment can reach the pipe of its own worker; what it forges there ends that worker."""
    forge = (
        STEP + "        import os\n\n        for fd in range(3, 12):\n            try:\n"
        f"                os.write(fd, {reply!r})\n            except OSError:\n                pass\n"
        "        os._exit(0)\n"
    )
    with SandboxedEnvironment(changed((STEP, forge)), isolation=ISOLATION) as environment:
        env = environment.spec.make_env()
        env.reset(0)
        with pytest.raises(EnvironmentFault, match=said):
            say(env, "x")


def test_bad_sources(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not found"):
        SandboxedEnvironment(tmp_path / "nothing.py", isolation=ISOLATION)
    with pytest.raises(GameError, match="unknown game"):
        SandboxedEnvironment("no_such_game", isolation=ISOLATION)
    two = GOOD.read_text() + GOOD.read_text().rsplit("register_game(", 1)[0][:0]
    two += 'register_game(GameSpec(name="capability_second", make_env=Game))\n'
    (tmp_path / "two.py").write_text(two)
    with pytest.raises(GameError, match="name the one"):
        SandboxedEnvironment(tmp_path / "two.py", isolation=ISOLATION)
    with SandboxedEnvironment(tmp_path / "two.py", name="capability_second", isolation=ISOLATION) as environment:
        assert environment.spec.name == "capability_second"


def test_a_module_that_hangs_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_worker, "START_TIMEOUT_S", 0.7)
    (tmp_path / "slow.py").write_text("while True:\n    pass\n")
    with pytest.raises(GameError, match="longer than"):
        SandboxedEnvironment(tmp_path / "slow.py", isolation=ISOLATION)


@pytest.mark.skipif(ISOLATION != "bwrap", reason="the weaker isolation leaves files readable")
def test_the_worker_sees_neither_secrets_nor_the_project(changed: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-secret")
    peek = (
        "        import glob, os\n\n        found = str(dict(os.environ)) + str(os.listdir('/trace'))\n"
        "        found += str([p for p in ('/root/.ssh', '/etc/passwd', '/home') if os.path.exists(p)])\n"
        "        self.messages.append({'role': 'user', 'content': found})\n\n"
    )
    file = changed(
        ("    @property\n    def done", "    def peek(self) -> None:\n" + peek + "    @property\n    def done"),
        ('state its balance."}\n        ]\n', 'state its balance."}\n        ]\n        self.peek()\n'),
    )
    with SandboxedEnvironment(file, isolation="bwrap") as environment:
        env = environment.spec.make_env()
        env.reset(0)
        seen = str(env.get_messages()[-1]["content"])
    assert "sk-secret" not in seen and "train" not in seen and seen.endswith("[]")
    assert "game_registry.py" in seen


# --------------------------------------------------------------------------- cost and cleanliness


def test_a_step_costs_less_than_a_millisecond(ledger: SandboxedEnvironment) -> None:
    env = ledger.spec.make_env()
    best = float("inf")
    for _ in range(10):  # the best of several: other processes run beside this one
        env.reset(0)
        began = time.perf_counter()
        for _ in range(4):
            say(env, "hello")
        best = min(best, (time.perf_counter() - began) / 4)
    assert best < 0.001, f"{best * 1e3:.3f} ms"


def test_workers_end_with_the_process(tmp_path: Path) -> None:
    code = (
        "from pipeline.remote_game import sandboxed_spec\n"
        f"spec = sandboxed_spec({str(GOOD)!r}, isolation={ISOLATION!r})\n"
        "env = spec.make_env(); env.reset(0)\n"
        "print(env._worker.process.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path(f"/proc/{done.stdout.strip()}").exists()


def test_importing_the_proxy_needs_no_torch() -> None:
    code = "import sys, pipeline.remote_game\nprint('torch' in sys.modules or 'train' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"
