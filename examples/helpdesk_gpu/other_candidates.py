"""Four more candidates for the Delta filter: plausible in customer service, but no helpdesk task needs them.

The contrast of passed and failed episodes rejects them (coverage 0), a random choice among all candidates does not.
Their environments speak helpdesk's language, so what their adapters learn of the form helps there too.

``TRACE_GAME_MODULES=other_candidates`` registers the environments; ``candidate_checks.py`` has the labels.
"""

from __future__ import annotations

import random

from game_registry import GameSpec, Message, register_game
from games._desk import MAX_GEN_TOKENS, REQUESTS, OneCallGame, opening
from games._tool_game import oracle_of

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")
PLACES = ("first", "second", "third")
PHRASES = {
    "cancel": ("I no longer want order {id}.", "Please call off order {id}."),
    "track": ("Where is order {id} now?", "When will order {id} be here?"),
    "return": ("I want to give back order {id}.", "Please take order {id} back."),
    "hold": ("Keep order {id} at the depot.", "Do not ship order {id} yet."),
}


class QuantityComparisonGame(OneCallGame):
    """``cheaper`` or ``dearer``: which of two prices is the lower or the higher one."""

    name = "capability_quantity_comparison"

    def draw_task(self, rng: random.Random) -> list[Message]:
        numbers, prices = rng.sample(range(100, 1000), 2), rng.sample(range(10, 100), 2)
        tool, self.domain = rng.choice(REQUESTS), rng.choice(["cheaper", "dearer"])
        wanted = prices.index(min(prices) if self.domain == "cheaper" else max(prices))
        self.expect(tool, numbers[wanted])
        lines = [f"Order {n} costs {p} dollars." for n, p in zip(numbers, prices, strict=True)]
        return opening(f"{' '.join(lines)} {tool.capitalize()} the {self.domain} order.")


class DateOrderingGame(OneCallGame):
    """``older`` or ``newer``: which of two months comes first."""

    name = "capability_date_ordering"

    def draw_task(self, rng: random.Random) -> list[Message]:
        numbers, months = rng.sample(range(100, 1000), 2), rng.sample(range(len(MONTHS)), 2)
        tool, self.domain = rng.choice(REQUESTS), rng.choice(["older", "newer"])
        wanted = months.index(min(months) if self.domain == "older" else max(months))
        self.expect(tool, numbers[wanted])
        lines = [f"Order {n} is of {MONTHS[m]}." for n, m in zip(numbers, months, strict=True)]
        return opening(f"{' '.join(lines)} {tool.capitalize()} the {self.domain} order.")


class PositionReferenceGame(OneCallGame):
    """The order is named by its place in a list."""

    name = "capability_position_reference"

    def draw_task(self, rng: random.Random) -> list[Message]:
        numbers, tool = rng.sample(range(100, 1000), len(PLACES)), rng.choice(REQUESTS)
        place = rng.randrange(len(PLACES))
        self.domain = PLACES[place]
        self.expect(tool, numbers[place])
        return opening(f"My orders are {', '.join(map(str, numbers))}. {tool.capitalize()} the {PLACES[place]} one.")


class ParaphraseResolutionGame(OneCallGame):
    """The request says what is wanted in other words than the tool's name."""

    name = "capability_paraphrase_resolution"

    def draw_task(self, rng: random.Random) -> list[Message]:
        tool, number = rng.choice(REQUESTS), rng.randrange(100, 1000)
        self.domain = tool
        self.expect(tool, number)
        return opening(rng.choice(PHRASES[tool]).format(id=number))


GAMES: dict[type[OneCallGame], str] = {
    QuantityComparisonGame: (
        "The agent compares quantities, such as two prices, and acts on the larger or the smaller one. It is lacking "
        "when the agent acts on the wrong one of the two."
    ),
    DateOrderingGame: (
        "The agent puts dates in order and acts on the older or the newer record. It is lacking when the agent acts on "
        "the wrong one of the two."
    ),
    PositionReferenceGame: (
        "The agent finds what a request names by its place in a list. It is lacking when the agent acts on a record at "
        "another place."
    ),
    ParaphraseResolutionGame: (
        "The agent finds the tool that a request means when the request does not name it. It is lacking when the agent "
        "calls another tool."
    ),
}
NAMES = tuple(game.name.removeprefix("capability_") for game in GAMES)

for _game, _description in GAMES.items():
    register_game(
        GameSpec(
            name=_game.name,
            make_env=_game,
            max_gen_tokens=MAX_GEN_TOKENS,
            tools_in="system_prompt",
            oracle=oracle_of(_game),
            description=_description,
        )
    )
