"""Episodes as one readable page, offline: what was said, what came back, both rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined

from train.evaluation_report import message_text

if TYPE_CHECKING:
    from train.replay import Replayed

PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Replayed episodes</title>
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto; padding: 0 1rem }
details { margin: .4rem 0; padding: .3rem .8rem; border: 1px solid #8884; border-radius: 4px }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 .7rem; font-size: .83rem }
.role { opacity: .65; font-size: .75rem; text-transform: uppercase; letter-spacing: .05em }
.assistant { border-left: 3px solid #2a6fbb; padding-left: .6rem } .differs summary { color: #b8405e }
</style></head><body>
<h1>{{ episodes | length }} episodes</h1>
{% for e in episodes %}<details{% if e.differs %} class="differs"{% endif %}><summary>{{ e.title }}</summary>
{% for m in e.messages %}
<div class="{{ m.role }}"><div class="role">{{ m.role }}</div><pre>{{ m.text }}</pre></div>
{% endfor %}</details>
{% endfor %}</body></html>
"""


def render_page(replayed: Sequence[Replayed]) -> str:
    """HTML of ``replayed``, those that differ first."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    ordered = sorted(replayed, key=lambda r: r.equal)
    return environment.from_string(PAGE).render(episodes=[_episode(r) for r in ordered])


def _episode(replayed: Replayed) -> dict[str, Any]:
    entry = replayed.entry
    now = "none" if replayed.recomputed is None else f"{replayed.recomputed:.3f}"
    title = f"{entry.game}, seed {entry.task_id}, sample {entry.sample_idx}"
    title += f", adapter {entry.adapter}" if entry.adapter else ""
    title += f": reward {replayed.recorded:.3f}" + ("" if replayed.equal else f", now {now} {replayed.detail}")
    messages = [{"role": str(m.get("role")), "text": message_text(m)} for m in entry.messages]
    return {"title": title, "messages": messages, "differs": not replayed.equal}
