"""The pictures of routing, and the smoke test as a command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import gate_models as gm
import pytest
import torch

from moe_gate import build_capability_model, save_gate
from moe_gate.health import dominant_slots, heat_map_html, read_episodes, transcript_html
from moe_gate.recorder import RoutingStatistics
from pipeline.files import InputError

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_each_token_has_the_slot_that_most_layers_chose() -> None:
    routes = torch.tensor([[0, 1, 2], [0, 1, 1], [1, 1, 2]])
    slots, shares = dominant_slots(routes, 3)
    assert slots == [0, 1, 2] and shares == pytest.approx([2 / 3, 1.0, 2 / 3])
    text = transcript_html(["<b>", "ok", " & so"], routes, ["base", "alpha", 'be"ta'])
    assert "&lt;b&gt;" in text and " &amp; so" in text and "<b>" not in text
    assert re.findall(r"token (\d): (\S+) in (\d+)%", text) == [
        ("0", "base", "67"), ("1", "alpha", "100"), ("2", "be&quot;ta", "67"),
    ]  # fmt: skip


def test_heat_map_has_a_row_per_layer() -> None:
    statistics = RoutingStatistics({"base": 0.5, "alpha": 0.5}, 1.0, 10.0, [[1.0, 0.0], [0.0, 1.0]], [3, 7], 8)
    table = heat_map_html(statistics)
    assert table.count("<tr>") == 3 and "<td>3</td>" in table and "<td>7</td>" in table and table.count("1.00") == 2


def test_the_command_writes_one_offline_page(tmp_path: Path) -> None:
    base = gm.write_base(tmp_path / "base")
    model = build_capability_model(str(tmp_path / "base"), gm.two_adapters(base, tmp_path / "adapters"))
    gm.random_gates(model)
    save_gate(model, tmp_path / "gate", str(tmp_path / "base"))
    entries = [
        {"game": "g", "task_id": str(i), "token_ids": [1, 5, 9 + i, 40], "reward_info": {"reward": 1.0}}
        for i in range(3)
    ]
    (tmp_path / "r.json").write_text(json.dumps({"simulations": entries}))
    arguments = ["moe_gate.health", "--gate", str(tmp_path / "gate"), "--rollouts", str(tmp_path / "r.json")]
    done = run(*arguments, "--out", str(tmp_path / "page.html"), "--episodes", "2")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    assert text.count("<details") == 2 and text.count("<span") == 3 + 2 * 4 and "w40" in text
    assert "8 tokens" in text and not re.search(r"https?://|<script|<link", text)


def test_episodes_without_tokens_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"simulations": [{"task_id": "1"}]}))
    with pytest.raises(InputError, match=r"no entry has token_ids.*collect_rollouts --tokens"):
        read_episodes(str(tmp_path / "r.json"), 5)


def test_smoke_test() -> None:
    done = run("moe_gate.smoke_test")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   ") == 9 - 1 and "FAIL" not in done.stdout and "all checks passed" in done.stdout
