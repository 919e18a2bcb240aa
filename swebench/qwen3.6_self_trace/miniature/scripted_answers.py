"""What the miniature's scripted model says in phases 2 to 4: discovery, labels, scenarios, and repairs.

``ScriptedAnswers.chat`` takes the messages and the body of a chat request and gives the answer, or None when the
request is none of these phases' (an agent's, in phases 1 and 6). ``completion`` is the same for a prompt as text.

The labeller knows the miniature's instances (``plays``) but reads the transcript only: which instance it is, and the
message to quote. The writer hands out the hand-written scenarios that ship; the solver repairs every third time, so
that every sample has a pass rate above 0 and at most 0.5.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.scenarios import Scenario, load_scenarios, scenario_path
from pipeline.swe_game import SYSTEM, oracle_text

HERE = Path(__file__).resolve().parent
CAPABILITIES = {
    "deep_call_graph_traversal": (
        "Follow the calls from the symptom through several functions and modules to the line that decides it, and "
        "repair there. Shown by reading the callees before an edit; lacking when the edit patches where the symptom is."
    ),
    "semantic_logic_precision": (
        "Turn the stated rule into exact conditions: bounds, ties, order, empty input. Shown by an edit that covers "
        "every case of the issue; lacking when the edit covers only its example."
    ),
    "failure_reproduction_first": "Run the reported example and see it fail before any edit of the source is made.",
    "regression_test_running": "Run the tests of the repository after the last edit and before handing it in.",
    "patch_scope_control": "Keep the edit to the files that the fault needs, without cleaning up anything else.",
}
SOLVES_EVERY = 3


class ScriptedAnswers:
    """The scripted model of phases 2-4. Safe to call from several threads."""

    def __init__(self, instances: Path = HERE) -> None:
        files = [yaml.safe_load(f.read_text(encoding="utf-8")) for f in sorted(instances.glob("*.yaml"))]
        self.instances = {data["instance_id"]: data for data in files if isinstance(data, dict) and "plays" in data}
        self.shipped = {name: load_scenarios(scenario_path(name)) for name in list(CAPABILITIES)[:2]}
        self._solved: dict[str, int] = {}
        self._lock = threading.Lock()

    # ------------------------------------------------------------------ entry points

    def chat(self, messages: Sequence[dict[str, Any]], body: dict[str, Any]) -> str | None:
        text = "\n".join(str(m.get("content") or "") for m in messages)
        if schema := _schema(body):
            return json.dumps(self._label(text, schema) if "candidates" not in schema else self._discover(schema))
        if "Write one software-repair scenario" in text:
            return self._write(text)
        return self.completion(text)

    def completion(self, text: str) -> str | None:
        """A repair: right every third time for each scenario, else handed in unchanged."""
        if SYSTEM[:40] not in text:
            return None
        scenario = next((s for group in self.shipped.values() for s in group if _shows(text, s)), None)
        if scenario is None:
            return '{"name": "submit", "arguments": {}}'
        with self._lock:
            count = self._solved[scenario.name] = self._solved.get(scenario.name, -1) + 1
        return oracle_text(scenario) if count % SOLVES_EVERY == 0 else '{"name": "submit", "arguments": {}}'

    # ------------------------------------------------------------------ phase 2

    def _discover(self, schema: dict[str, Any]) -> dict[str, Any]:
        items = schema["candidates"]["items"]["properties"]
        ids = items["examples"]["items"]["properties"]["task_id"]["enum"]
        examples = [{"task_id": i, "note": "an example"} for i in ids[:4]]
        listed = list(CAPABILITIES.items())[: schema["candidates"]["maxItems"]]
        return {"candidates": [{"name": n, "description": d, "examples": examples} for n, d in listed]}

    def _label(self, text: str, schema: dict[str, Any]) -> dict[str, Any]:
        """LACKING and PRESENT of the instance's own capability; NA of all others."""
        transcript = text.rpartition("<trajectory>")[2].partition("</trajectory>")[0]
        instance = self._instance_of(transcript)
        index, quote = _quotable(transcript)
        answer: dict[str, Any] = {}
        for name, one in schema.items():
            any_index = one["properties"]["message"]["enum"][0]
            answer[name] = {"label": "NA", "message": any_index, "quote": ""}
            if instance is not None and name == instance["capability"]:
                unsolved = "trained" in instance["plays"]  # the base agent's way is not the right one
                answer[name] = {"label": "LACKING" if unsolved else "PRESENT", "message": index, "quote": quote}
        return answer

    def _instance_of(self, transcript: str) -> dict[str, Any] | None:
        """The instance whose package the transcript names most often."""
        counts = {i: len(re.findall(rf"\b{_package(i)}\b", transcript)) for i in self.instances}
        best = max(counts, key=lambda i: counts[i], default=None)
        return self.instances[best] if best is not None and counts[best] else None

    # ------------------------------------------------------------------ phase 3

    def _write(self, text: str) -> str:
        """The next shipped scenario of the capability whose name is not taken."""
        capability = next(name for name in self.shipped if f"{name}:" in text)
        taken = set(re.findall(r"^- (\w+)$", text, flags=re.MULTILINE))
        scenario = next((s for s in self.shipped[capability] if s.name not in taken), self.shipped[capability][0])
        return f"```json\n{json.dumps(scenario.model_dump(exclude_none=True))}\n```"


def token_answers(answers: ScriptedAnswers, model: Path) -> Callable[[list[int], dict[str, Any]], list[int]]:
    """``completion`` for a server that is asked in token ids: prompt ids and body -> sampled ids, with the end of turn.

    Args:
        model: folder with ``tokenizer.json``.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")

    def completion(ids: list[int], _body: dict[str, Any]) -> list[int]:
        said = answers.completion(tokenizer.decode(ids, skip_special_tokens=False)) or "I do not know this task."
        return [*tokenizer.encode(said, add_special_tokens=False).ids, *([end] if end is not None else [])]

    return completion


def _schema(body: dict[str, Any]) -> dict[str, Any]:
    """The properties of the answer that the request wants, empty when it wants free text."""
    form = body.get("response_format") or {}
    return dict(form.get("json_schema", {}).get("schema", {}).get("properties", {}))


def _shows(text: str, scenario: Scenario) -> bool:
    return scenario.module_code in text


def _package(instance: str) -> str:
    """``mini__ledger-1`` -> ``ledger``."""
    return instance.partition("__")[2].rpartition("-")[0]


def _quotable(transcript: str) -> tuple[int, str]:
    """Index and a piece of the last message of the assistant that has enough words to quote."""
    found = re.findall(r"^\[(\d+)\] assistant[^:\n]*: ?(.*(?:\n(?!\[\d+\] ).*)*)", transcript, flags=re.MULTILINE)
    for index, content in reversed(found):
        lines = [line.strip() for line in content.splitlines() if len(line.split()) >= 3 and "chars cut" not in line]
        if lines:
            return int(index), lines[0][:120]
    return 0, ""
