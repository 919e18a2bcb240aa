"""A small scenario for tests, and its variations."""

from __future__ import annotations

from typing import Any

from pipeline import sandbox
from pipeline.sandbox import Isolation
from pipeline.scenarios import Scenario

ISOLATION: Isolation = sandbox._probe_bwrap()[0] or Isolation("process", own_uid=False)

MODULE = '''
"""Fees of an account."""


def clip(value, low, high):
    return max(low, min(value, high))


def fee(amount):
    rate = 2
    return amount * rate // 100


def total(amounts):
    return sum(fee(amount) for amount in amounts)
'''.lstrip()

TESTS = "import pytest\n\nfrom fees import clip, fee, total\n\n\n" + "\n\n".join(
    [
        "def test_target():\n    assert fee(1000) == 30 and total([1000, 1000]) == 60",
        *(f"def test_guard_{i}():\n    assert clip({i}, 2, 5) == {min(max(i, 2), 5)}" for i in range(8)),
        "def test_zero():\n    assert fee(0) == 0",
        "@pytest.mark.parametrize('n', [0, 1])\ndef test_nothing(n):\n    assert total([0] * n) == 0",
    ]
)

FIELDS: dict[str, Any] = {
    "name": "fee_rate",
    "module_filename": "fees.py",
    "module_code": MODULE,
    "test_filename": "test_fees.py",
    "test_code": TESTS,
    "target_test": "test_fees.py::test_target",
    "pr_description": "Fees are too low: three per cent of 1000 is 30.",
    "oracle_search": "    rate = 2",
    "oracle_replace": "    rate = 3",
    "naive_fix_description": "Add one per cent in total.",
    "naive_search": "    return sum(fee(amount) for amount in amounts)",
    "naive_replace": "    return sum(fee(amount) + amount // 100 for amount in amounts)",
}
REPAIRED = MODULE.replace("rate = 2", "rate = 3")


def scenario(**changes: Any) -> Scenario:
    return Scenario.model_validate({**FIELDS, **changes})
