"""Write the skeleton of an environment that runs and passes every check but its own oracle.

    python -m pipeline.new_environment capability_refund_precision --description "Refund exactly what is owed."
    python pipeline/validate_environment.py capability_refund_precision_game.py

Replace the task, the tools and the reward by yours, write the oracle, and validate until it exits 0. With
``--with-oracle`` the skeleton's own oracle is there too, so that it passes as it stands: to look at, and to try the
other commands.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.command_line import Parser
from pipeline.files import InputError, read_text, run_cli, write_text

TEMPLATE = Path(__file__).with_name("skeleton_game.py.txt")
EMPTY_ORACLE = "return []"
ORACLE = """task = make_task(seed)
    target = task["target"]
    return [
        {"name": "get_record", "arguments": {"record_id": target}},
        {"name": "close_record", "arguments": {"record_id": target, "balance": task["records"][target]["balance"]}},
    ]"""


def skeleton(name: str, description: str, file: str, *, with_oracle: bool = False) -> str:
    """The source of the skeleton.

    Raises:
        InputError: a name that the registry refuses, or a description that would break the source.
    """
    if not re.fullmatch(r"capability_[a-z0-9][a-z0-9_]*", name):
        raise InputError(f"name {name!r}: expected capability_<snake_case>, such as capability_refund_precision")
    if re.search(r'["\\\n]', description) or not description.strip():
        raise InputError(f"--description {description!r:.60}: expected one line without quotes or backslashes")
    values = {"NAME": name, "DESCRIPTION": description, "FILE": file, "ORACLE": ORACLE if with_oracle else EMPTY_ORACLE}
    text = read_text(TEMPLATE, "skeleton")
    for key, value in values.items():
        text = text.replace(f"@@{key}@@", value)
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("name", help="capability_<snake_case>")
    parser.add_argument("--description", default="Say in one line what the policy must do.", help="one line")
    parser.add_argument("-o", "--output", metavar="F", help="file to write (default: <name>_game.py in this folder)")
    parser.add_argument("--with-oracle", action="store_true", help="include the oracle of the skeleton's own task")
    args = parser.parse_args(argv)
    output = Path(args.output or f"{args.name}_game.py")
    source = skeleton(args.name, args.description, str(output), with_oracle=args.with_oracle)
    if os.path.lexists(output):  # also a link to nowhere
        raise InputError(f"{output}: exists; choose another name or --output, nothing is overwritten")
    write_text(output, source)
    sys.stdout.write(f"{output}\nnext: python pipeline/validate_environment.py {output}\n")
    return 0


if __name__ == "__main__":
    run_cli(main)
