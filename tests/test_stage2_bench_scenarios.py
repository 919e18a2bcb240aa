"""The command that measures the shipped scenarios: rates with intervals, resumed, into the document."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer
from stage2_helpers import ISOLATION

from benchmarks import bench_scenarios as bench
from pipeline.endpoint import Endpoint
from pipeline.files import InputError, ServerError
from pipeline.swe_game import oracle_text

ROOT = Path(__file__).resolve().parents[1]


def run(monkeypatch: pytest.MonkeyPatch, server: ScriptedServer, folder: Path, *flags: str) -> int:
    common = ["--base-url", server.url, "--model", "scripted", "--parts", "rates", "--rollouts", "2"]
    common += ["--isolation", ISOLATION.kind, "--work-dir", str(folder), "--output", str(folder / "out.json")]
    monkeypatch.setattr(sys, "argv", ["bench_scenarios.py", *common, *flags])
    return bench.main()


def test_rates_are_measured_once_and_written_to_the_document(
    scripted_server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_one = bench.shipped()[0][1]
    asked: list[int] = []

    def chat(messages: list[dict[str, Any]], body: dict[str, Any]) -> str:
        """Solves the first sample of the first scenario; says nothing useful otherwise."""
        asked.append(body["seed"])
        first = first_one.pr_description in messages[1]["content"]
        return oracle_text(first_one) if first and body["seed"] == sum(first_one.name.encode()) else "I cannot."

    scripted_server.chat = chat
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "environments.md").write_text("<!-- scenarios:begin -->\nold\n<!-- scenarios:end -->\n")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert run(monkeypatch, scripted_server, tmp_path, "--docs", "--concurrency", "1") == 0
    result = json.loads((tmp_path / "out.json").read_text())
    rows = result["scenarios"]
    assert len(rows) == len(bench.shipped()) == 10 and all(row["n"] == 2 for row in rows)
    first = rows[0]
    assert first["pass_rate"]["value"] == 0.5 and first["in_band"]
    assert first["pass_rate"]["ci95"] == pytest.approx([0.0945, 0.9055], abs=1e-3), "Wilson for 1 of 2"
    assert not any(row["in_band"] for row in rows[1:]) and rows[1]["turns"] == 8
    document = (tmp_path / "docs" / "environments.md").read_text()
    assert "old" not in document and document.count("\n| ") == 11
    requests = len(asked)
    assert run(monkeypatch, scripted_server, tmp_path) == 0 and len(asked) == requests, "nothing is drawn again"
    with pytest.raises(InputError, match="other settings"):
        run(monkeypatch, scripted_server, tmp_path, "--temperature", "0.5")


def test_a_dead_server_is_one_line(
    scripted_server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "Endpoint", lambda url, model: Endpoint(url, model, retries=0))
    scripted_server.fail = "refuse"
    with pytest.raises(ServerError, match=r"cannot be reached|HTTP"):
        run(monkeypatch, scripted_server, tmp_path)
    assert not (tmp_path / "out.json").exists()


def test_parts_are_checked(scripted_server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="expected some of rates, synthesis"):
        run(monkeypatch, scripted_server, tmp_path, "--parts", "rate")


def test_the_job_runs_the_command_with_flags_that_exist() -> None:
    script = (ROOT / "benchmarks" / "gpu" / "synthesis.sh").read_text()
    line = script.partition("bench_scenarios.py")[2]
    flags = set(re.findall(r"--[a-z-]+", line)) | set(re.findall(r"few=\"([^\"]*)\"", script)[0].split()[::2])
    assert len(flags) > 8 and all(flag in bench._parser().format_help() for flag in flags)
