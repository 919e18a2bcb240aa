"""Write the report of a selection: one HTML file that opens offline, and the same facts as JSON.

    python pipeline/report.py --selection pipeline/selected_capabilities.json --output pipeline/selection_report.html

Shows coverage and gap with intervals, agreement, a heat map of capabilities and failures, overlap, sensitivity, and
quotes that link to the trajectories. Everything is read from the files that the aggregator wrote and named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipeline import report_data, svg_plots
from pipeline.command_line import Parser
from pipeline.evidence import LOW_KAPPA
from pipeline.files import run_cli, write_json, write_text

TEMPLATE = "selection_report.html.j2"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--selection", default="pipeline/selected_capabilities.json", help="export of the aggregator")
    parser.add_argument("--runs", nargs="+", help="label runs, when they are not where the report says")
    parser.add_argument("--summaries", help="summaries file, for the cited trajectories")
    parser.add_argument("--output", default="pipeline/selection_report.html", help="HTML file to write")
    parser.add_argument("--json-output", help="JSON file to write (default: beside the HTML)")
    return parser.parse_args(arguments)


def plots(data: dict[str, Any]) -> dict[str, Markup]:
    """The plots of a report, as SVG."""
    per = data["evidence"]["per_capability"]
    candidates = [c for c in data["candidates"] if c["skill"] in per]
    points = [
        svg_plots.Point(
            c["skill"],
            c["mean_cov"],
            c["mean_delta"],
            tuple(per[c["skill"]]["cov_interval"]),
            tuple(per[c["skill"]]["delta_interval"]),
            c["selected"],
        )
        for c in candidates
    ]
    rho, delta = (float(Fraction(str(data["thresholds"][k]))) for k in ("rho", "delta"))
    overlap, votes = data["evidence"]["jaccard"], data["votes"]
    added = data["evidence"]["marginal_coverage"]["added"]
    found = {
        "coverage_gap": svg_plots.coverage_gap(points, rho, delta),
        "kappa": svg_plots.bars(
            [(c["skill"], per[c["skill"]]["kappa"], c["selected"]) for c in candidates],
            mark=LOW_KAPPA,
            label="agreement",
        ),
        "votes": svg_plots.heat_map(votes["capabilities"], votes["ids"], votes["lacking_share"], "votes"),
        "marginal": svg_plots.bars([(a["skill"], a["share"], True) for a in added], label="marginal coverage"),
        "jaccard": svg_plots.heat_map(overlap["names"], overlap["names"], overlap["matrix"], "overlap"),
    }
    return {name: Markup(text) for name, text in found.items()}


def _interval(values: Sequence[float]) -> str:
    return f"[{values[0]:.3f}, {values[1]:.3f}]"


def html(data: dict[str, Any]) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).resolve().parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,  # quotes and trajectories are other people's text
        trim_blocks=True,
    )
    anchors = {trajectory: f"t{n}" for n, trajectory in enumerate(data["trajectories"])}
    cited = {(q["id"], q["message"]) for group in data["quotes"].values() for q in group}
    return environment.get_template(TEMPLATE).render(
        d=data, plots=plots(data), anchors=anchors, cited=cited, interval=_interval
    )


def main() -> int:
    args = parse_arguments()
    data = report_data.build(Path(args.selection), args.runs, args.summaries)
    output = Path(args.output)
    json_output = Path(args.json_output) if args.json_output else output.with_suffix(".json")
    page = html(data)
    write_json(json_output, data)
    write_text(output, page)
    sys.stdout.write(f"{output} and {json_output}\n")
    return 0


if __name__ == "__main__":
    run_cli(main)
