"""Print the names of the best selected capabilities, one a line.

    python examples/quickstart/choose.py runs/quickstart/selected_capabilities.json --count 2
"""

from __future__ import annotations

import argparse

from pipeline.files import InputError, read_json, run_cli


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("selection", help="selected_capabilities.json")
    parser.add_argument("--count", type=int, default=2, help="how many [%(default)s]")
    args = parser.parse_args()
    selection = read_json(args.selection, "selection")
    if not isinstance(selection, list) or len(selection) < args.count:
        found = len(selection) if isinstance(selection, list) else type(selection).__name__
        raise InputError(f"selection {args.selection}: expected at least {args.count} capabilities, found {found}")
    for entry in selection[: args.count]:
        print(entry["skill"])
    return 0


if __name__ == "__main__":
    run_cli(main)
