"""Mutations of scenarios: what they change, what they leave alone, and the proof by the tests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from stage2_helpers import ISOLATION, MODULE, scenario

from pipeline import mutate_scenario as mutation
from pipeline.mutate_scenario import STRATEGIES, main, mutate
from pipeline.scenarios import Scenario, load_scenarios, save_scenarios, scenario_path, static_problems
from pipeline.swe_grading import Grade, self_test


def behaviour(code: str) -> list[int]:
    """The module's functions on some inputs. The module is this test's own, so it may run here."""
    space: dict[str, object] = {}
    exec(code, space)
    clip, fee, total = space["clip"], space["fee"], space["total"]
    return [clip(v, 2, 5) for v in range(8)] + [fee(v) for v in range(0, 5000, 77)] + [total([100, 2000, 50])]  # type: ignore[operator]


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_strategy_changes_the_text_and_not_the_behaviour(name: str) -> None:
    changed = STRATEGIES[name](scenario(), random.Random(3))
    if name == "inline_helpers":
        assert changed is None, "clip is called by the tests only, and the others are edited"
        return
    assert changed is not None and changed.module_code != MODULE
    assert static_problems(changed) == []
    assert changed.test_code == scenario().test_code and changed.pr_description == scenario().pr_description
    assert behaviour(changed.module_code) == behaviour(MODULE)
    for which in ("oracle", "naive"):
        search, replace = getattr(changed, f"{which}_search"), getattr(changed, f"{which}_replace")
        old = scenario().module_code.replace(
            getattr(scenario(), f"{which}_search"), getattr(scenario(), f"{which}_replace")
        )
        assert behaviour(changed.module_code.replace(search, replace)) == behaviour(old)


def test_rename_takes_module_and_edits_together() -> None:
    changed = mutation.rename_identifiers(scenario(), random.Random(0))
    assert changed is not None
    assert "rate = 2" not in changed.module_code and "rate" not in changed.oracle_search
    assert "def fee(" in changed.module_code, "what the tests import keeps its name"


def test_rename_leaves_what_is_visible_alone() -> None:
    code = MODULE.replace("    rate = 2\n", "    rate = 2\n    'a rate in a text'\n")
    names = mutation._renamable(scenario(module_code=code))
    assert "rate" not in names and "amount" in names
    code = MODULE.replace("fee(amount) for amount", "fee(amount=amount) for amount")
    assert "amount" not in mutation._renamable(scenario(module_code=code)), (
        "a keyword argument is part of the interface"
    )


HELPER = MODULE.replace("    return amount * rate // 100", "    return share(amount, rate)") + (
    "\n\ndef share(part, per_cent):\n    return part * per_cent // 100\n"
)


def test_inline_puts_the_expression_into_the_caller() -> None:
    changed = mutation.inline_helpers(scenario(module_code=HELPER), random.Random(0))
    assert changed is not None and "return (" in changed.module_code and "= share(" not in changed.module_code
    assert behaviour(changed.module_code) == behaviour(HELPER)


@pytest.mark.parametrize(
    "helper",
    [
        "def share(part, per_cent):\n    return part * per_cent // 100 + part\n",  # a parameter used twice
        "def share(part, per_cent=2):\n    return part * per_cent // 100\n",
        "def share(part, per_cent):\n    part = part * per_cent\n    return part // 100\n",
        "def share(part, per_cent):\n    return [p for p in [part * per_cent]][0] // 100\n",
    ],
)
def test_inline_leaves_alone_what_it_cannot_prove(helper: str) -> None:
    code = MODULE.replace("    return amount * rate // 100", "    return share(amount, rate)") + "\n\n" + helper
    changed = mutation.inline_helpers(scenario(module_code=code), random.Random(0))
    assert changed is None or "share(amount, rate)" in changed.module_code


def test_inline_keeps_precedence() -> None:
    code = MODULE.replace("    return amount * rate // 100", "    return 2 * added(amount, 1 - rate)") + (
        "\n\ndef added(a, b):\n    return a + b\n"
    )
    changed = mutation.inline_helpers(scenario(module_code=code), random.Random(0))
    assert changed is not None and behaviour(changed.module_code) == behaviour(code)


def test_a_decoy_is_never_called_and_the_search_text_stays_unique() -> None:
    changed = mutation.add_decoys(scenario(), random.Random(0))
    assert changed is not None and "_legacy(" in changed.module_code
    assert changed.module_code.count("_legacy") == 1 and changed.module_code.count(changed.oracle_search) == 1


def test_a_chain_passes_the_call_on() -> None:
    changed = mutation.lengthen_chain(scenario(naive_search=None, naive_replace=None), random.Random(0))
    assert changed is not None and "_fee_inner" in changed.module_code and "_fee_step" in changed.module_code


def test_a_mutation_that_changes_behaviour_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def harmful(one: Scenario, rng: random.Random) -> Scenario:
        return one.model_copy(
            update={"module_code": one.module_code.replace("max(low, min(value, high))", "min(value, high)")}
        )

    monkeypatch.setitem(STRATEGIES, "harmful", harmful)
    assert mutate(scenario(), random.Random(0), ["harmful"], ISOLATION) is None


def test_mutate_proves_names_and_forgets_measurements() -> None:
    measured = scenario(pass_rate=0.9, n_rollouts=10, sampling={"temperature": 1.0})
    result = mutate(measured, random.Random(0), ["rename_identifiers"], ISOLATION)
    assert result is not None
    changed, strategy = result
    assert (changed.name, strategy) == ("fee_rate_mut1", "rename_identifiers")
    assert changed.pass_rate is changed.n_rollouts is changed.sampling is None


@pytest.mark.usefixtures("proven")
def test_names_are_numbered() -> None:
    again = mutate(scenario(name="fee_rate_mut3"), random.Random(1), ["add_decoys"], ISOLATION)
    assert again is not None and again[0].name == "fee_rate_mut4"


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is taken for granted, for tests about other things."""
    monkeypatch.setattr(mutation, "self_test", lambda *_: [])
    monkeypatch.setattr(mutation, "graded_before", lambda *_: Grade({}, {}, 0.0))


@pytest.mark.usefixtures("proven")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_scenarios(tmp_path / "in.json", [scenario()])
    flags = ["--strategy", "rename_identifiers", "--isolation", ISOLATION.kind]
    assert main([str(tmp_path / "in.json"), "-o", str(tmp_path / "out.json"), *flags]) == 0
    assert load_scenarios(tmp_path / "out.json")[0].name == "fee_rate_mut1"
    assert "fee_rate_mut1: rename_identifiers" in capsys.readouterr().out
    assert main([str(tmp_path / "in.json"), "-o", str(tmp_path / "o.json"), "--strategy", "inline_helpers"]) == 1


CAPABILITIES = ("deep_call_graph_traversal", "semantic_logic_precision")
SHIPPED = [one for capability in CAPABILITIES for one in load_scenarios(scenario_path(capability))]


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_strategy_finds_something_in_the_shipped_scenarios(name: str, capability: str) -> None:
    changed = [STRATEGIES[name](one, random.Random(1)) for one in load_scenarios(scenario_path(capability))]
    found = [one for one in changed if one is not None]
    assert found and all(static_problems(one) == [] for one in found)


@pytest.mark.parametrize("one", SHIPPED, ids=lambda one: one.name)
def test_strategies_hold_on_the_shipped_scenarios(one: Scenario) -> None:
    """All of them on top of each other, as rounds of mutation do; the tests prove the result."""
    applied = []
    for name in sorted(STRATEGIES):
        changed = STRATEGIES[name](one, random.Random(1))
        if changed is not None:
            applied.append(name)
            one = changed
    assert len(applied) >= 3 and self_test(one, ISOLATION) == []
