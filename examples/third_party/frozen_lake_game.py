"""A third-party environment as a game: Gymnasium's FrozenLake, wrapped in 30 lines.

    pip install gymnasium
    python pipeline/validate_environment.py examples/third_party/frozen_lake_game.py --packages

The wrapper class is the part to copy for any environment with ``reset(seed)`` and ``step(action)``; the rest describes
this one: how a map is drawn from a seed, how it looks in words, and which moves solve it.
"""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from game_registry import Action, GameSpec, Message, ToolSchema, read_json_call, register_game

MOVES = ("left", "down", "right", "up")  # FrozenLake's actions 0 to 3
SIZE = 8


# ---- the wrapper
class GymGame:
    max_steps = 30

    def reset(self, seed: int) -> None:
        self.env = make_lake(seed)
        self.at, _ = self.env.reset(seed=seed)
        self.steps, self.ended, self.messages = 0, False, [{"role": "user", "content": look(self.env, self.at)}]

    @property
    def done(self) -> bool:
        return self.ended or self.steps >= self.max_steps

    def get_system_prompt(self) -> str:
        return "Walk over the ice from S to G, one move per turn. H is a hole."

    def get_tool_schemas(self) -> list[ToolSchema]:
        return [TOOL]

    def get_messages(self) -> list[Message]:
        return self.messages

    def step(self, action_json: str) -> None:
        self.steps, move = self.steps + 1, read_move(action_json)
        if move is not None and not self.ended:
            self.at, _, self.ended, _, _ = self.env.step(move)
        said = look(self.env, self.at) if move is not None else f"Error: call move with one of {', '.join(MOVES)}."
        self.messages += [{"role": "assistant", "content": action_json}, {"role": "user", "content": said}]

    def get_summary(self) -> dict[str, Any]:
        return {"reward": progress(self.env, self.at), "steps": self.steps, "reason": "walked", "domain": "ice"}


# ---- this environment
def read_move(action_json: str) -> int | None:
    call = read_json_call(action_json)
    wanted = call["arguments"].get("direction") if isinstance(call, dict) and call["name"] == "move" else None
    return MOVES.index(wanted) if wanted in MOVES else None


TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Take one step.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string", "enum": list(MOVES)}},
            "required": ["direction"],
        },
    },
}


def make_lake(seed: int) -> Any:
    return gymnasium.make("FrozenLake-v1", desc=generate_random_map(SIZE, seed=seed), is_slippery=False).unwrapped


def look(env: Any, at: int) -> str:
    rows = ["".join(cell.decode() for cell in row) for row in env.desc]
    row, column = divmod(at, SIZE)
    return "\n".join(rows) + f"\nYou are in row {row + 1}, column {column + 1}."


def distances(env: Any) -> dict[int, int]:
    """Steps from each safe square to the goal."""
    goal = SIZE * SIZE - 1
    found, border = {goal: 0}, [goal]
    while border:
        border = [
            s
            for s in env.P
            if s not in found
            and env.desc[divmod(s, SIZE)] in (b"S", b"F")
            and any(env.P[s][a][0][1] in border for a in range(4))
        ]
        found |= dict.fromkeys(border, 1 + max(found.values()))
    return found


def progress(env: Any, at: int) -> float:
    """1 at the goal, 0 in a hole; else the square of the share of the way, so that a first step is nearly nothing."""
    steps = distances(env)
    return (1 - steps[at] / steps[0]) ** 2 if steps.get(at, steps[0]) < steps[0] else 0.0


def oracle(seed: int) -> list[Action]:
    env = make_lake(seed)
    steps, at, actions = distances(env), 0, []
    while steps[at]:
        move = min(range(4), key=lambda a: steps.get(env.P[at][a][0][1], SIZE * SIZE))
        at = env.P[at][move][0][1]
        actions.append({"name": "move", "arguments": {"direction": MOVES[move]}})
    return actions


register_game(
    GameSpec(
        name="capability_grid_navigation",
        make_env=GymGame,
        max_gen_tokens=32,
        oracle=oracle,
        description="Plan a path on a grid and walk it without a wrong step.",
    )
)
