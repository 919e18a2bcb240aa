"""Grading across two sandboxes: what tests may do with the module, forged verdicts, rewards, the self-test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage2_helpers import ISOLATION, MODULE, REPAIRED, TESTS, scenario

from pipeline.sandbox import Limits
from pipeline.scenarios import Scenario, load_scenarios, scenario_path
from pipeline.swe_grading import Grade, baseline, grade, reward, self_test


def graded(code: str, **changes: Any) -> Grade:
    return grade(scenario(**changes), code, isolation=ISOLATION)


def earned(code: str) -> float:
    return reward(scenario(), graded(code), ISOLATION)


# --------------------------------------------------------------------------- rewards


def test_baseline() -> None:
    base = baseline(scenario(), ISOLATION)
    assert base.targets == ("test_target",)
    assert len(base.guards) == 11 and "test_nothing[1]" in base.guards


def test_the_right_edit_earns_everything_and_a_useless_one_nothing() -> None:
    assert earned(REPAIRED) == 1.0
    assert earned(MODULE) == 0.0
    assert earned(MODULE.replace("Fees of", "The fees of")) == 0.0, "a useless edit"


def test_regressions_count() -> None:
    broken = REPAIRED.replace("max(low, min(value, high))", "value")  # clip: five of eight guards break
    assert 0 < earned(broken) < 1
    assert earned(broken) == pytest.approx(7 / 11)


def test_a_target_of_several_cases_pays_by_case() -> None:
    tests = TESTS.replace(
        "def test_target():\n    assert fee(1000) == 30 and total([1000, 1000]) == 60",
        "@pytest.mark.parametrize('a, f', [(1000, 30), (2000, 99)])\ndef test_target(a, f):\n    assert fee(a) == f",
    )
    one = scenario(test_code=tests)
    assert baseline(one, ISOLATION).targets == ("test_target[1000-30]", "test_target[2000-99]")
    assert reward(one, grade(one, REPAIRED, isolation=ISOLATION), ISOLATION) == 0.5


def test_missing_and_skipped_are_failed() -> None:
    result = Grade({"test_zero": "skipped"}, {}, 0.0)
    assert not result.passed("test_zero") and not result.passed("test_that_never_ran")
    assert reward(scenario(), result, ISOLATION) == 0.0


# --------------------------------------------------------------------------- forged verdicts

EXIT = "import os\nos._exit(0)\n"
ATEXIT = "import atexit\natexit.register(lambda: print('12 passed'))\n"
REPORT = (
    "import os\n"
    "for fd in range(0, 64):\n"
    "    try:\n"
    '        os.write(fd, b\'{"nodes": {"test_target": "passed"}, "details": {}}\')\n'
    "    except OSError:\n"
    "        pass\n"
)
PATCH = (
    "import sys\n"
    "for name in list(sys.modules):\n"
    "    if 'pytest' in name:\n"
    "        sys.modules[name].raises = None\n"
    "import builtins\n"
    "builtins.AssertionError = Exception\n"
)
EQUAL = (
    "\n\nclass Equal:\n    def __eq__(self, other):\n        return True\n\n"
    "    def __radd__(self, other):\n        return self\n\n"
    "    __add__ = __radd__\n\n    def __bool__(self):\n        return True\n\n\ndef fee(amount):\n    return Equal()\n"
)
FILES = (
    "import glob, os\n"
    "for path in glob.glob('/tmp/**', recursive=True) + ['/tmp/tests/test_fees.py', '/trace/pipeline/swe_tests.py']:\n"
    "    try:\n"
    "        open(path, 'w').write('def test_target(): pass')\n"
    "    except OSError:\n"
    "        pass\n"
)
TEXT = (
    "\n\nclass Text(int):\n    def __eq__(self, other):\n        return True\n\n\n"
    "def fee(amount):\n    return Text(7)\n"
)


# Without bubblewrap these would reach real files and processes: they are attacks.
needs_bwrap = pytest.mark.skipif(ISOLATION.kind != "bwrap", reason="no bubblewrap: the attacks would do harm")


@needs_bwrap
@pytest.mark.parametrize(
    "attack",
    [
        EXIT,
        ATEXIT + MODULE,
        REPORT + MODULE,
        PATCH + MODULE,
        MODULE + EQUAL,
        FILES + MODULE,
        MODULE + TEXT,
        "raise SystemExit(0)\n",
    ],
    ids=["exit", "atexit", "report", "patch", "equal", "files", "subclass", "sysexit"],
)
def test_no_forged_verdict(attack: str) -> None:
    assert not graded(attack).passed("test_target")
    assert earned(attack) == 0.0


@needs_bwrap
def test_a_module_that_hangs_or_floods() -> None:
    for code in ("while True:\n    pass\n", MODULE + "\n\ndef fee(amount):\n    while True:\n        pass\n"):
        result = grade(scenario(), code, isolation=ISOLATION, limits=Limits(wall_s=2, cpu_s=1))
        assert not result.passed("test_target")
    bomb = "x = [0] * 10\nwhile True:\n    x = x + x\n"
    assert grade(scenario(), bomb, isolation=ISOLATION, limits=Limits(memory_mb=256)).nodes == {}


def test_a_broken_module_fails_everything_and_says_why() -> None:
    result = graded("def f(:\n")
    assert result.nodes == {} and "SyntaxError" in result.details["import"]


# --------------------------------------------------------------------------- what tests may do


RICH_MODULE = """
import collections
import dataclasses
import datetime
import decimal
import enum


class Broke(ValueError):
    def __init__(self, owner, missing):
        super().__init__(owner)
        self.missing = missing


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Account:
    owner: str
    balance: int = 0

    def pay(self, amount):
        if amount > self.balance:
            raise Broke(self.owner, amount - self.balance)
        self.balance -= amount
        return self

    def __len__(self):
        return self.balance

    def __add__(self, other):
        return Account(self.owner, self.balance + other.balance)


class Opened:
    closed = False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True


LIMIT = 5


def apply(function, values):
    return [function(v) for v in values]


def numbers(n):
    yield from range(n)


def sort_in_place(values):
    values.sort()


def point():
    return Point(1, 2)


def limit():
    return LIMIT


def values():
    return {"d": decimal.Decimal("1.5"), "t": (1, {2}), "b": b"x", "f": float("inf"), "day": datetime.date(2024, 2, 29)}
"""
RICH_TESTS = """
import datetime
import decimal

import pytest
import rich
from rich import Account, Broke, Colour


def test_objects():
    account = Account("ann", 5)
    assert account.pay(2) is account and account.balance == 3 and len(account) == 3
    assert account == Account("ann", 3) and account != Account("bob", 3)
    assert isinstance(account, Account) and not isinstance(3, Account)
    assert repr(account) == "Account(owner='ann', balance=3)" and (account + account).balance == 6
    account.balance = 9
    assert account.balance == 9


def test_own_exceptions():
    with pytest.raises(Broke, match="ann") as caught:
        Account("ann").pay(4)
    assert caught.value.missing == 4
    with pytest.raises(ValueError):
        Account("ann").pay(4)


def test_builtin_exceptions():
    with pytest.raises(AttributeError):
        rich.nothing
    with pytest.raises(TypeError):
        rich.limit(1)


def test_functions_of_the_test():
    seen = []
    assert rich.apply(lambda v: seen.append(v) or v * 2, [1, 2]) == [2, 4] and seen == [1, 2]
    assert rich.apply(rich.apply.__name__.count, ["p"]) == [2]
    assert rich.apply(str, [1]) == ["1"]


def test_an_exception_in_a_function_of_the_test():
    def bad(value):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        rich.apply(bad, [1])


def test_generators_and_contexts():
    assert list(rich.numbers(3)) == [0, 1, 2] and next(rich.numbers(1)) == 0
    with rich.Opened() as opened:
        assert not opened.closed
    assert opened.closed


def test_lists_that_are_changed_in_place():
    values = [3, 1]
    rich.sort_in_place(values)
    assert values == [1, 3]


def test_tuples_with_names():
    assert rich.point() == (1, 2) and rich.point().y == 2


def test_enumerations():
    assert Colour.RED is Colour.RED and Colour.RED != Colour.BLUE and Colour(1) is Colour.RED


def test_constants_can_be_patched(monkeypatch):
    monkeypatch.setattr(rich, "LIMIT", 9)
    assert rich.limit() == 9


def test_patches_are_undone():
    assert rich.limit() == 5


def test_values():
    got = rich.values()
    assert got["d"] == decimal.Decimal("1.5") and got["t"] == (1, {2}) and got["b"] == b"x"
    assert got["f"] == float("inf") and got["day"] == datetime.date(2024, 2, 29)
"""


def test_the_module_behaves_as_if_it_were_imported() -> None:
    one = scenario(
        module_filename="rich.py", module_code=RICH_MODULE, test_filename="test_rich.py", test_code=RICH_TESTS
    )
    result = grade(one, RICH_MODULE, isolation=ISOLATION)
    assert len(result.nodes) == 12
    assert set(result.nodes.values()) == {"passed"}, result.details


# --------------------------------------------------------------------------- self-test


def test_a_good_scenario_has_no_problem() -> None:
    assert self_test(scenario(), ISOLATION) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"module_code": "raise OSError('x')\n" + MODULE}, "does not import"),
        ({"module_code": REPAIRED, "oracle_search": "rate = 3", "oracle_replace": "rate = 4"}, "does not fail before"),
        ({"oracle_replace": "    rate = 4"}, "after the oracle edit test_target does not pass"),
        ({"oracle_replace": "    rate = 3 if amount else 99\n    amount += 100 * (not amount)"}, "does not pass"),
        (
            {"naive_search": "    return amount * rate // 100", "naive_replace": "    return amount * 3 // 100"},
            "naive edit",
        ),
        ({"test_code": TESTS.replace("clip(", "9 + clip(")}, "guard tests pass before"),
    ],
)
def test_self_test_finds(changes: dict[str, Any], said: str) -> None:
    problems = self_test(scenario(**changes), ISOLATION)
    assert any(said in p for p in problems), problems


def test_self_test_finds_flaky_tests(tmp_path: Path) -> None:
    flaky = TESTS + "\n\n\ndef test_sometimes():\n    import os\n\n    assert os.urandom(1)[0] % 2\n"
    problems: list[str] = []
    for attempt in range(12):  # two runs agree by chance half of the time
        problems = self_test(scenario(test_code=flaky + f"# {attempt}\n"), ISOLATION)
        if problems:
            break
    assert problems


def _shipped() -> list[Scenario]:
    names = ("deep_call_graph_traversal", "semantic_logic_precision")
    return [s for name in names for s in load_scenarios(scenario_path(name))]


def test_a_shipped_scenario_passes_the_self_test() -> None:
    assert self_test(_shipped()[0], ISOLATION) == []


@pytest.mark.parametrize("one", _shipped(), ids=lambda s: s.name)
def test_shipped_scenarios_pass_the_self_test(one: Scenario) -> None:
    assert self_test(one, ISOLATION) == []
