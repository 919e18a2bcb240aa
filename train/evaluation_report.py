"""``report.html`` of an evaluation: one file, inline SVG, no script, readable offline and in print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from train.svg import heat_map, interval_chart, line_chart

Entries = Mapping[tuple[str, str, str], Sequence[dict[str, Any]]]
EPISODES_SHOWN = 3  # of each environment

PAGE = Path(__file__).with_name("evaluation.html.jinja")


def render_report(
    result: Mapping[str, Any], curves: Mapping[str, Sequence[Mapping[str, float]]], entries: Entries
) -> str:
    """The page.

    Args:
        result: the content of ``evaluation.json``.
        curves: adapter -> training iterations.
        entries: the episodes, to show some.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        info=result["info"],
        environments=[_environment(name, modes) for name, modes in result["results"].items()],
        curves=[Markup(c) for c in _curves(curves)],
        maps=[_map(name, data) for name, data in result["routing"].items()],
        choices=[_choice(name, data) for name, data in result["choice"].items()],
        samples=_samples(result, entries),
    )


def _environment(name: str, modes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    systems = list(dict.fromkeys(s for rows in modes.values() for s in rows))
    points = [(s, [(mode, rows[s]["reward"]) for mode, rows in modes.items() if s in rows]) for s in systems]
    chart = interval_chart(points, f"Mean reward on {name} with 95 % intervals")
    return {"name": name, "chart": Markup(chart), "modes": [_mode(m, rows) for m, rows in modes.items()]}


def _mode(name: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    ks = sorted({int(k) for row in rows.values() for k in row["pass_hat"]})
    best = next((row["best_single"] for row in rows.values() if row["best_single"]), None)
    title = {"greedy": "Greedy", "sampled": "Temperature 1"}.get(name, name)
    table = [_row(system, row, ks) for system, row in rows.items()]
    return {"name": title, "rows": table, "ks": ks, "best": f" ({best})" if best else ""}


def _row(name: str, row: Mapping[str, Any], ks: Sequence[int]) -> dict[str, Any]:
    return {
        "name": name,
        "reward": _interval(row["reward"]),
        "success": _interval(row["success"]),
        "vs_base": _signed(row["vs_base"]),
        "success_vs_base": _signed(row["success_vs_base"]),
        "success_sure": _excludes_zero(row["success_vs_base"]),
        "vs_best_single": _signed(row["vs_best_single"]),
        "base_sure": _excludes_zero(row["vs_base"]),
        "single_sure": _excludes_zero(row["vs_best_single"]),
        "pass_hat": [f"{row['pass_hat'][str(k)]:.3f}" if str(k) in row["pass_hat"] else "" for k in ks],
        "truncated": f"{100 * row['truncation_share']:.1f}%",
        "errors": f"{100 * row['error_share']:.1f}%",
        "invalid": f"{row['invalid_calls_per_turn']:.2f}",
        "tokens": f"{row['mean_tokens']:.0f}",
    }


def _interval(value: Mapping[str, float] | None) -> str:
    return "none scored" if value is None else f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _signed(value: Mapping[str, float] | None) -> str:
    return "" if value is None else f"{value['value']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"


def _excludes_zero(value: Mapping[str, float] | None) -> bool:
    return value is not None and (value["low"] > 0 or value["high"] < 0)


def _curves(curves: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """One chart per quantity that some run has logged."""
    charts = []
    for key, title in (
        ("reward", "mean reward of the sampled groups"),
        ("eval_reward", "held-out greedy reward"),
        ("informative", "share of groups with a signal"),
        ("entropy", "entropy per sampled token (nats)"),
    ):
        series = {name: [(r["iteration"], r[key]) for r in rows if key in r] for name, rows in curves.items()}
        series = {name: points for name, points in series.items() if points}
        if series:
            top = max(y for points in series.values() for _, y in points)
            charts.append(line_chart(series, title, title, 1.0 if key != "entropy" else max(top, 0.1)))
    return charts


def _map(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    rows = data["layer_shares"]
    labels = [str(i) for i in data.get("layers", range(len(rows)))]
    chart = heat_map(rows, data["slots"], labels, f"Share of each slot per layer on {name}")
    shares = ", ".join(f"{slot} {share:.2f}" for slot, share in data["share_of_slot"].items())
    return {
        "name": name,
        "chart": Markup(chart),
        "note": f"{data.get('tokens', '?')} tokens; over all layers: {shares}",
    }


def _choice(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    picks = ", ".join(f"{option} {count / data['tasks']:.0%}" for option, count in data["picks"].items())
    return {
        "name": name,
        "picks": picks,
        "invalid": f"{data['invalid_share']:.1%}",
        "tokens": f"{data['mean_prompt_tokens']:.0f}",
        "examples": data["invalid_examples"],
    }


def _samples(result: Mapping[str, Any], entries: Entries) -> list[dict[str, Any]]:
    """Per environment the seeds on which rewards of the systems differ most, each system's first episode of them."""
    samples = []
    for env in dict.fromkeys(env for _, env, _ in entries):
        mode = result["info"]["modes"][0]
        by_system = {
            s: {e["task_id"]: e for e in es if e["sample_idx"] == 0}
            for (s, v, m), es in entries.items()
            if (v, m) == (env, mode)
        }
        tasks = sorted(set.intersection(*(set(es) for es in by_system.values())), key=int)
        spread = {t: _spread([es[t] for es in by_system.values()]) for t in tasks}
        for task in sorted(tasks, key=lambda t: (-spread[t], int(t)))[:EPISODES_SHOWN]:
            samples += [_episode(env, system, es[task]) for system, es in by_system.items()]
    return samples


def _reward(entry: Mapping[str, Any]) -> float | None:
    return entry["reward_info"]["reward"] if entry["outcome"] == "scored" else None


def _spread(entries: Sequence[Mapping[str, Any]]) -> float:
    rewards = [r for r in map(_reward, entries) if r is not None]
    return max(rewards) - min(rewards) if rewards else 0.0


def _episode(env: str, system: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    reward = _reward(entry)
    verdict = f"reward {reward:.2f}" if reward is not None else f"error: {entry.get('error_kind')}"
    ending = f"{entry['finish_reason']}, {entry['turns']} turns"
    return {
        "title": f"{env}, seed {entry['task_id']}, {system}: {verdict} ({ending})",
        "messages": [{"role": m["role"], "text": message_text(m)} for m in entry["messages"]],
    }


def message_text(message: Mapping[str, Any]) -> str:
    """Content and calls of one chat message, as they were said where that is known."""
    if message.get("raw_content"):
        return str(message["raw_content"])
    calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
    return "\n".join(filter(None, [str(message.get("content") or ""), *calls]))
