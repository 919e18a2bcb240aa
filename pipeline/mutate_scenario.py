"""Make a scenario harder to recognise without changing what it does: names, helpers, decoys, longer call chains.

    python -m pipeline.mutate_scenario pipeline/swebench/C/scenarios_parsed.json -o harder.json --rounds 2

Every strategy rewrites module and oracle edit together and leaves the tests as they are; the tests then prove that
behaviour is the same: the mutated scenario must pass the whole self-test, else that mutation is not used. Strategies
return None where they have nothing to do.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import random
import re
import sys
from collections.abc import Callable, Sequence

from pipeline import sandbox
from pipeline.command_line import Parser, non_negative_int, positive_int
from pipeline.files import run_cli
from pipeline.sandbox import Isolation
from pipeline.scenarios import Scenario, load_scenarios, save_scenarios
from pipeline.swe_grading import graded_before, self_test

Strategy = Callable[[Scenario, random.Random], Scenario | None]
NEW_NAMES = ("entry", "piece", "slot", "mark", "level", "basis", "probe", "carry", "trace", "chunk", "label", "state")
_EDITS = ("oracle_search", "oracle_replace", "naive_search", "naive_replace")


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


def _rewrite(scenario: Scenario, change: Callable[[str], str]) -> Scenario:
    """``change`` applied to the module and to both edits."""
    fields = {name: change(getattr(scenario, name)) for name in _EDITS if getattr(scenario, name) is not None}
    return scenario.model_copy(update={**fields, "module_code": change(scenario.module_code)})


def _functions(scenario: Scenario) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(scenario.module_code).body if isinstance(node, ast.FunctionDef)]


# --------------------------------------------------------------------------- rename


def _renamable(scenario: Scenario) -> list[str]:
    """Names bound in functions that nothing outside can see: no attribute, keyword, text or test has them."""
    tree = ast.parse(scenario.module_code)
    bound: set[str] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            bound |= {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
            bound |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    visible = _words(scenario.test_code) | _words(scenario.pr_description) | set(dir(builtins)) | set(keyword.kwlist)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            visible.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            visible.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            visible |= _words(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            visible |= {alias.asname or alias.name for alias in node.names}
    return sorted(name for name in bound - visible if not name.startswith("__") and len(name) > 1)


def rename_identifiers(scenario: Scenario, rng: random.Random) -> Scenario | None:
    """Rename local names and parameters, everywhere in the module and in the edits."""
    names = _renamable(scenario)
    everything = _words(scenario.module_code) | _words(scenario.test_code)
    everything |= set().union(*(_words(getattr(scenario, e) or "") for e in _EDITS))
    free = [name for name in NEW_NAMES if name not in everything]
    rng.shuffle(free)
    mapping = dict(zip(names, free, strict=False))
    if not mapping:
        return None
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, mapping)) + r")\b")
    return _rewrite(scenario, lambda text: pattern.sub(lambda m: mapping[m.group(1)], text))


# --------------------------------------------------------------------------- inline


def _segment(code: str, node: ast.expr) -> tuple[int, int]:
    """Offsets of an expression in the source (positions of the syntax tree count UTF-8 bytes)."""
    starts = [0]
    for line in code.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None and node.end_col_offset is not None
    lines = code.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)


def _one_liner(function: ast.FunctionDef) -> ast.expr | None:
    """The expression of ``def f(a, b): return <expression>`` with plain parameters, each used at most once."""
    body = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    arguments = function.args
    plain = not (arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults)
    if len(body) != 1 or not isinstance(body[0], ast.Return) or body[0].value is None or not plain:
        return None
    used = [n.id for n in ast.walk(body[0].value) if isinstance(n, ast.Name)]
    scoped = any(isinstance(n, ast.Lambda | ast.comprehension | ast.NamedExpr) for n in ast.walk(body[0].value))
    once = all(used.count(a.arg) <= 1 for a in arguments.args)
    return body[0].value if once and not scoped and function.name not in used else None


def inline_helpers(scenario: Scenario, rng: random.Random) -> Scenario | None:
    """Put the expression of a one-line helper where it is called, outside of the places that the edits touch."""
    hidden = set().union(*(_words(getattr(scenario, e) or "") for e in _EDITS))
    searches = [s.strip() for s in (scenario.oracle_search, scenario.naive_search) if s is not None]
    helpers = [
        f
        for f in _functions(scenario)
        if _one_liner(f) is not None
        and f.name not in hidden
        and not any(s in (ast.get_source_segment(scenario.module_code, f) or "") for s in searches)
    ]
    rng.shuffle(helpers)
    for helper in helpers:
        code = _inlined(scenario.module_code, helper)
        if code != scenario.module_code:
            return scenario.model_copy(update={"module_code": code})
    return None


def _inlined(code: str, helper: ast.FunctionDef) -> str:
    expression = _one_liner(helper)
    assert expression is not None
    parameters = [a.arg for a in helper.args.args]
    calls = [
        node
        for function in ast.parse(code).body
        if not (isinstance(function, ast.FunctionDef) and function.name == helper.name)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == helper.name
    ]
    for call in sorted(calls, key=lambda c: (c.lineno, c.col_offset), reverse=True):
        nested = any(other is not call and other in ast.walk(call) for other in calls)
        if call.keywords or len(call.args) != len(parameters) or nested:
            continue
        values = {name: ast.unparse(value) for name, value in zip(parameters, call.args, strict=True)}
        text = _substituted(expression, values)
        start, end = _segment(code, call)
        code = f"{code[:start]}({text}){code[end:]}"
    return code


def _substituted(expression: ast.expr, values: dict[str, str]) -> str:
    class Substitute(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.parse(f"({values[node.id]})", mode="eval").body if node.id in values else node

    return ast.unparse(Substitute().visit(ast.parse(ast.unparse(expression), mode="eval").body))


# --------------------------------------------------------------------------- decoys and chains


def add_decoys(scenario: Scenario, rng: random.Random) -> Scenario | None:
    """A second function that looks like the place to edit, and that nothing calls."""
    search = scenario.oracle_search
    edited = [
        f for f in _functions(scenario) if search.strip() in (ast.get_source_segment(scenario.module_code, f) or "")
    ]
    others = [f for f in _functions(scenario) if f not in edited]
    for function in [*edited, *rng.sample(others, len(others))]:
        source = ast.get_source_segment(scenario.module_code, function) or ""
        names = sorted({n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)})
        names += [a.arg for a in function.args.args]
        taken = _words(scenario.module_code) | _words(scenario.test_code)
        free = [name for name in NEW_NAMES if name not in taken]
        if len(free) < len(names):
            continue
        new = f"{function.name}_legacy"
        mapping = {**dict(zip(names, rng.sample(free, len(names)), strict=True)), function.name: new}
        pattern = re.compile(r"\b(" + "|".join(map(re.escape, mapping)) + r")\b")
        copy = pattern.sub(lambda m, mapping=mapping: mapping[m.group(1)], source)  # type: ignore[misc]
        code = f"{scenario.module_code.rstrip()}\n\n\n{copy}\n"
        searches = [s for s in (search, scenario.naive_search) if s is not None]
        if new not in taken and all(code.count(s) == 1 for s in searches):
            return scenario.model_copy(update={"module_code": code})
    return None


def lengthen_chain(scenario: Scenario, rng: random.Random) -> Scenario | None:
    """Between the callers of the edited function and its body, two functions that only pass the call on."""
    fragile = set().union(*(_words(getattr(scenario, e) or "") for e in _EDITS))
    functions = [f for f in _functions(scenario) if not f.decorator_list and f.name not in fragile]
    edited = [
        f
        for f in functions
        if scenario.oracle_search.strip() in (ast.get_source_segment(scenario.module_code, f) or "")
    ]
    for function in edited or rng.sample(functions, min(1, len(functions))):
        name = function.name
        inner, middle = f"_{name}_inner", f"_{name}_step"
        if {inner, middle} & _words(scenario.module_code):
            continue
        code = re.sub(rf"^def {re.escape(name)}\(", f"def {inner}(", scenario.module_code, flags=re.MULTILINE)
        code = f"{code.rstrip()}\n\n\ndef {middle}(*args, **kwargs):\n    return {inner}(*args, **kwargs)\n"
        code += f"\n\ndef {name}(*args, **kwargs):\n    return {middle}(*args, **kwargs)\n"
        return scenario.model_copy(update={"module_code": code})
    return None


def wrap_in_class(scenario: Scenario, rng: random.Random) -> Scenario | None:
    """A function that the edits do not touch becomes a static method, with its old name kept as an alias."""
    fragile = set().union(*(_words(getattr(scenario, e) or "") for e in _EDITS))
    functions = [
        f
        for f in _functions(scenario)
        if not f.decorator_list
        and f.name not in fragile
        and scenario.oracle_search.strip() not in (ast.get_source_segment(scenario.module_code, f) or "")
        and (scenario.naive_search or "\0").strip() not in (ast.get_source_segment(scenario.module_code, f) or "")
    ]
    if not functions:
        return None
    function = rng.choice(functions)
    source = ast.get_source_segment(scenario.module_code, function) or ""
    owner = "".join(part.title() for part in function.name.split("_")) + "Rules"
    if owner in _words(scenario.module_code) or '"""' in source:
        return None
    body = "\n".join(f"    {line}" if line.strip() else line for line in source.splitlines())
    wrapped = f"class {owner}:\n    @staticmethod\n{body}\n\n\n{function.name} = {owner}.{function.name}"
    return scenario.model_copy(update={"module_code": scenario.module_code.replace(source, wrapped, 1)})


STRATEGIES: dict[str, Strategy] = {
    "rename_identifiers": rename_identifiers,
    "inline_helpers": inline_helpers,
    "add_decoys": add_decoys,
    "lengthen_chain": lengthen_chain,
    "wrap_in_class": wrap_in_class,
}


def mutate(
    scenario: Scenario, rng: random.Random, names: Sequence[str] | None = None, isolation: Isolation | None = None
) -> tuple[Scenario, str] | None:
    """One proven mutation and its strategy; None when no strategy applies and is proven.

    The result's name is the scenario's with a number, and what was measured on the original is dropped.
    """
    order = list(names or STRATEGIES)
    if names is None:
        rng.shuffle(order)
    for strategy in order:
        changed = STRATEGIES[strategy](scenario, rng)
        if changed is None or changed.module_code == scenario.module_code:
            continue
        base, _, number = scenario.name.partition("_mut")
        update = {"name": f"{base}_mut{int(number or 0) + 1}", "pass_rate": None, "n_rollouts": None, "sampling": None}
        changed = changed.model_copy(update=update)
        same = graded_before(changed, isolation).nodes == graded_before(scenario, isolation).nodes
        if same and not self_test(changed, isolation):
            return changed, strategy
    return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("scenarios", help="scenario file")
    add("-o", "--output", required=True, help="file to write")
    add("--rounds", type=positive_int, default=1, help="mutations on top of each other (at most 5 are of use)")
    add("--strategy", action="append", choices=sorted(STRATEGIES), help="only this strategy; may be repeated")
    add("--seed", type=non_negative_int, default=0, help="random seed")
    add("--isolation", default="auto", choices=("auto", "bwrap", "process"), help="how modules are shut in")
    args = parser.parse_args(argv)
    isolation = sandbox.find_isolation(args.isolation)
    out, untouched = [], 0
    for scenario in load_scenarios(args.scenarios):
        rng = random.Random(f"{args.seed}:{scenario.name}")
        used: list[str] = []
        for _ in range(args.rounds):
            mutated = mutate(scenario, rng, args.strategy, isolation)
            if mutated is None:
                break
            scenario, strategy = mutated
            used.append(strategy)
        untouched += not used
        out.append(scenario)
        sys.stdout.write(f"{scenario.name}: {', '.join(used) or 'no strategy applies'}\n")
    save_scenarios(args.output, out)
    return 1 if untouched else 0


if __name__ == "__main__":
    run_cli(main)
