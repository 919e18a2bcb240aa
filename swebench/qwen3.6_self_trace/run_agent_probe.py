"""What mini-swe-agent would make of a configuration. Started in the agents' environment by ``require_classes``::

    .venv-agents/bin/python -I run_agent_probe.py '{"model_class": "litellm", "agent": {}, "environment": {...}}'

Prints JSON. Nothing is started: a model's class is looked up in its source (importing litellm takes seconds), and the
environment's settings are made without the environment. Imports nothing of the project: the pins do not fit together.
"""

import ast
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from minisweagent.agents.default import AgentConfig
from minisweagent.environments import _ENVIRONMENT_MAPPING
from minisweagent.models import _MODEL_CLASS_MAPPING


def has_model_class(name: str) -> bool:
    """Whether ``get_model_class`` would find it: a short name, or the dotted path of a class."""
    module, _, last = _MODEL_CLASS_MAPPING.get(name, name).rpartition(".")
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):
        return False
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return False
    nodes = list(ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))))
    named = {n.name for n in nodes if isinstance(n, ast.ClassDef)}
    return last in named | {a.asname or a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}


def environment(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that an environment's settings know, or why there would be none."""
    name = config.pop("environment_class")
    module, _, last = _ENVIRONMENT_MAPPING.get(name, name).rpartition(".")
    try:
        fields = getattr(importlib.import_module(module), f"{last}Config")
    except ImportError as error:
        return {"problem": f"{name} cannot be imported ({error})", "missing": (error.name or "").partition(".")[0]}
    image = {"image": "probe"} if "image" in fields.model_fields else {}
    try:
        fields(**image, **config)
    except ValueError as error:
        return {"problem": f"{name} refuses its settings ({' '.join(str(error).split())[:200]})"}
    return {"known": sorted(fields.model_fields)}


def main() -> None:
    asked = json.loads(sys.argv[1])
    found = {
        "model": has_model_class(asked["model_class"]),
        "models": sorted(_MODEL_CLASS_MAPPING),
        "ignored_by_agent": sorted(set(asked["agent"]) - set(AgentConfig.model_fields)),
        "environment": environment(asked["environment"]),
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
