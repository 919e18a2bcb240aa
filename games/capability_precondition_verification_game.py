"""Precondition verification: check the state of a record against the policy before acting on it.

    python pipeline/validate_environment.py games/capability_precondition_verification_game.py

Cancelling needs a pending order, returning a delivered one, anything else must be denied. The states of two orders are
given and the request names one of them by its id. Half of the requests are allowed and half are not: a policy that
always does as it is asked and one that denies everything both succeed on one half, so a success rate near one half
shows no verification. One turn: the call ends the episode.
"""

from __future__ import annotations

import random

from game_registry import GameSpec, Message, register_game
from games._desk import MAX_GEN_TOKENS, STATUS_REQUIRED, STATUSES, OneCallGame, opening
from games._tool_game import oracle_of

NAME = "capability_precondition_verification"


class PreconditionVerificationGame(OneCallGame):
    """``allowed`` or ``forbidden``: the tool that was asked for, or ``deny``."""

    name = NAME

    def draw_task(self, rng: random.Random) -> list[Message]:
        tool = rng.choice(list(STATUS_REQUIRED))
        allowed = rng.random() < 0.5
        status = STATUS_REQUIRED[tool]
        if not allowed:
            status = rng.choice([s for s in STATUSES if s != status])
        number, other = rng.sample(range(100, 1000), 2)
        states = [f"Order {number} is {status}.", f"Order {other} is {rng.choice(STATUSES)}."]
        rng.shuffle(states)
        self.domain = "allowed" if allowed else "forbidden"
        self.expect(tool if allowed else "deny", number)
        return opening(f"{' '.join(states)} {tool.capitalize()} order {number}.")

    def reward(self) -> float:
        """1 for the right decision on the right order, 0.1 for the decision alone, 0.02 for any other valid call.

        The id alone earns nothing more: the request spells it out, so copying it is no verification.
        """
        if self.found is None or self.found == self.expected:
            return float(self.found is not None)
        return 0.1 if self.found[0] == self.expected[0] else 0.02


register_game(
    GameSpec(
        name=NAME,
        make_env=PreconditionVerificationGame,
        max_gen_tokens=MAX_GEN_TOKENS,
        tools_in="system_prompt",
        oracle=oracle_of(PreconditionVerificationGame),
        hint_prompt="Hint: compare the state of the order with the policy first, then act or deny.",
        description=(
            "The agent checks the state of a record against the policy before it acts, and denies a request that the "
            "policy forbids. It is lacking when the agent acts without being allowed to, or denies what is allowed."
        ),
    )
)
