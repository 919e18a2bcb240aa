"""Pictures of routing: which capability spoke where. Self-contained HTML, opens offline.

    python -m moe_gate.health --gate runs/gate --rollouts runs/rollouts.json --out routing.html

Shows, for the episodes of a rollouts file that has token ids: shares per slot, entropy, switches per 100 tokens, a heat
map of layers by slots, and every transcript with each token in the colour of the slot that most layers chose.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_gate.checkpoint import load_routed
from moe_gate.recorder import RoutingRecorder, RoutingStatistics
from moe_gate.routing import routing_state
from pipeline.files import InputError, read_json, run_cli, write_text

COLOURS = ("#9aa0a6", "#e8710a", "#1a73e8", "#188038", "#a142f4", "#d93025", "#129eaf", "#b06000")
STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em;max-width:75em}pre{white-space:pre-wrap;line-height:1.8}"
    "pre span{border-radius:3px;padding:1px 0}td,th{padding:1px 8px;text-align:right}td:first-child{text-align:left}"
    "td.h{min-width:5em;color:#000}.key span{border-radius:3px;padding:2px 8px;margin-right:8px;color:#fff}"
    "summary{cursor:pointer}"
)


def colour(slot: int) -> str:
    return COLOURS[slot % len(COLOURS)]


def dominant_slots(routes_LT: Tensor, num_slots: int) -> tuple[list[int], list[float]]:
    """For each token the slot that most layers chose, and the share of layers that did: two lists of length T."""
    votes = torch.nn.functional.one_hot(routes_LT.long(), num_slots).float().mean(0)
    share, slot = votes.max(-1)
    return slot.tolist(), share.tolist()


def transcript_html(pieces: Sequence[str], routes_LT: Tensor, slot_names: Sequence[str]) -> str:
    """The text of one episode, each token tinted by its dominant slot (stronger = more layers agree); details on hover.

    Args:
        pieces: the text of every token, length T.
        routes_LT: slots per adapted layer and token.
    """
    slots, shares = dominant_slots(routes_LT, len(slot_names))
    parts = []
    for position, (piece, slot, share) in enumerate(zip(pieces, slots, shares, strict=True)):
        alpha = round(15 + 55 * share)
        title = f"token {position}: {slot_names[slot]} in {share:.0%} of the layers"
        style = f"background:color-mix(in srgb,{colour(slot)} {alpha}%,transparent)"
        parts.append(f'<span style="{style}" title="{html.escape(title, quote=True)}">{html.escape(piece)}</span>')
    return f"<pre>{''.join(parts)}</pre>"


def heat_map_html(statistics: RoutingStatistics) -> str:
    """Layers by slots, each cell the share of that layer's tokens."""
    names = list(statistics.share_of_slot)
    rows = ["<tr><th>layer</th>" + "".join(f"<th>{html.escape(name)}</th>" for name in names) + "</tr>"]
    for layer, shares in zip(statistics.layers, statistics.layer_shares, strict=True):
        cells = "".join(
            f'<td class="h" style="background:color-mix(in srgb,{colour(slot)} {round(100 * share)}%,white)">'
            f"{share:.2f}</td>"
            for slot, share in enumerate(shares)
        )
        rows.append(f"<tr><td>{layer}</td>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def summary_html(statistics: RoutingStatistics) -> str:
    """The colour key with shares, and the two scalars."""
    key = "".join(
        f'<span style="background:{colour(slot)}">{html.escape(name)} {share:.1%}</span>'
        for slot, (name, share) in enumerate(statistics.share_of_slot.items())
    )
    return (
        f'<p class="key">{key}</p><p>{statistics.tokens} tokens, entropy {statistics.entropy_bits:.2f} bits, '
        f"{statistics.switches_per_100_tokens:.1f} switches per 100 tokens</p>"
    )


def page(title: str, statistics: RoutingStatistics, transcripts: Sequence[tuple[str, str]]) -> str:
    """The whole page; ``transcripts`` are (headline, html) pairs."""
    details = "".join(
        f"<details {'open' if i == 0 else ''}><summary>{html.escape(headline)}</summary>{body}</details>"
        for i, (headline, body) in enumerate(transcripts)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>{summary_html(statistics)}<h2>Share per layer</h2>{heat_map_html(statistics)}"
        f"<h2>Transcripts</h2>{details}</html>"
    )


def report(
    model: Any, tokenizer: Any, episodes: Sequence[tuple[str, list[int]]], title: str
) -> tuple[str, RoutingStatistics]:
    """HTML and statistics of ``episodes`` (headline, token ids) under the model's own routes."""
    names = routing_state(model).slot_names
    device = next(model.parameters()).device
    transcripts = []
    with RoutingRecorder(model) as recorder, torch.no_grad():
        for headline, token_ids in episodes:
            model.capability_decoder(input_ids=torch.tensor([token_ids], device=device), use_cache=False)
            routes = recorder.calls[-1].routes_LBT()[:, 0]
            pieces = [tokenizer.decode([token]) for token in token_ids]
            transcripts.append((headline, transcript_html(pieces, routes, names)))
    statistics = recorder.statistics()
    return page(title, statistics, transcripts), statistics


def read_episodes(path: str, limit: int) -> list[tuple[str, list[int]]]:
    """Headlines and token ids of a rollouts file.

    Raises:
        InputError: no entry has token ids.
    """
    data = read_json(path, "rollouts file")
    entries = data.get("simulations", []) if isinstance(data, dict) else []
    found = [entry for entry in entries if isinstance(entry, dict) and entry.get("token_ids")][:limit]
    if not found:
        raise InputError(
            f"rollouts file {path}: no entry has token_ids; collect again with train.collect_rollouts --tokens"
        )
    return [
        (
            f"{entry.get('game', 'task')} {entry.get('task_id', '?')}, sample {entry.get('sample_idx', 0)}, "
            f"reward {(entry.get('reward_info') or {}).get('reward')}",
            [int(token) for token in entry["token_ids"]],
        )
        for entry in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", required=True, help="folder of a gate run")
    parser.add_argument("--rollouts", required=True, help="rollouts file with token ids (collected with --tokens)")
    parser.add_argument("--out", default="routing.html", help="[%(default)s]")
    parser.add_argument("--episodes", type=int, default=20, help="how many, from the start of the file [%(default)s]")
    args = parser.parse_args()
    episodes = read_episodes(args.rollouts, args.episodes)
    model = load_routed(args.gate)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    text, statistics = report(model, tokenizer, episodes, f"Routing of {Path(args.gate).name}")
    write_text(args.out, text)
    shares = ", ".join(f"{name} {share:.1%}" for name, share in statistics.share_of_slot.items())
    sys.stdout.write(f"{args.out}: {statistics.tokens} tokens: {shares}\n")
    return 0


if __name__ == "__main__":
    run_cli(main)
