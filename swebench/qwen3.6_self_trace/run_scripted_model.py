"""A scripted model for the miniature: an OpenAI-style server that plays the commands declared with each instance.

    python swebench/qwen3.6_self_trace/run_scripted_model.py --port 8011

It recognises an instance by its issue and answers the n-th call with the n-th command of the play, as a ``bash`` tool
call; the agent that runs them is the real one. The base model's name gets the play ``base``, every other name (a loaded
adapter, an exported checkpoint) the play ``trained``. Which instances are solved is thus declared, not computed: the
miniature proves that the phases work, and says nothing about a model.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from run_declared import Declared, read_declared

from pipeline.command_line import Parser, positive_int
from pipeline.files import run_cli

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE / "miniature"), str(HERE.parents[1] / "tests")]  # the server is the one that the tests use
from scripted_answers import ScriptedAnswers, token_answers  # noqa: E402
from scripted_server import ScriptedServer  # noqa: E402

MINIATURE = HERE / "miniature"
MAX_MODEL_LEN = 8192  # that of SmolLM2: phases 1 and 6 compare only under equal context lengths
Messages = list[dict[str, Any]]
Responder = Callable[[Messages, dict[str, Any]], dict[str, Any] | str | None]


class ScriptedAgent:
    """Answers mini-swe-agent. None for conversations that are about no declared instance."""

    def __init__(self, instances: Sequence[Declared], base_model: str = "scripted") -> None:
        self.instances, self.base_model = instances, base_model

    def __call__(self, messages: Messages, body: dict[str, Any]) -> dict[str, Any] | None:
        if not any(tool.get("function", {}).get("name") == "bash" for tool in body.get("tools", [])):
            return None
        task = "\n".join(str(m.get("content")) for m in messages[:2])
        found = [i for i in self.instances if i.problem_statement.strip() in task]
        if len(found) != 1:
            return None
        play = found[0].play("base" if body.get("model") == self.base_model else "trained")
        said = sum(m.get("role") == "assistant" for m in messages)
        if said >= len(play):
            return {"role": "assistant", "content": "I have nothing more to do."}
        call = {"name": "bash", "arguments": json.dumps({"command": play[said]})}
        return {
            "role": "assistant",
            "content": f"Step {said + 1} of {len(play)}.",
            "tool_calls": [{"id": f"call_{said}", "type": "function", "function": call}],
            "finish_reason": "tool_calls",
        }


def answer_with(responders: Sequence[Responder]) -> Callable[[Messages, dict[str, Any]], dict[str, Any] | str]:
    """The first answer that a responder has."""

    def chat(messages: Messages, body: dict[str, Any]) -> dict[str, Any] | str:
        for responder in responders:
            if (answer := responder(messages, body)) is not None:
                return answer
        return "I do not know this conversation."

    return chat


def scripted_server(
    source: Path = MINIATURE, *, model: str = "scripted", responders: Sequence[Responder] = (), **fields: Any
) -> ScriptedServer:
    """The server, not started yet: the agent of phases 1 and 6, what phases 2 to 4 ask; ``responders`` come first."""
    chat = answer_with([*responders, ScriptedAgent(read_declared(source), model), ScriptedAnswers(source).chat])
    return ScriptedServer(chat=chat, model=model, max_model_len=MAX_MODEL_LEN, **fields)


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--source", default=str(MINIATURE), help="folder of declared instances")
    parser.add_argument("--model", default="scripted", help="name of the base model")
    parser.add_argument("--tokenizer", help="model folder: the server then also answers token ids, as phase 4 asks")
    parser.add_argument("--port", type=positive_int, default=8011, help="on 127.0.0.1")
    args = parser.parse_args()
    fields: dict[str, Any] = {"port": args.port}
    if args.tokenizer:
        fields["completion"] = token_answers(ScriptedAnswers(Path(args.source)), Path(args.tokenizer))
    with scripted_server(Path(args.source), model=args.model, **fields) as server:
        sys.stdout.write(f"serving {args.model} at {server.url}; Ctrl-C ends it\n")
        sys.stdout.flush()
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    run_cli(main)
