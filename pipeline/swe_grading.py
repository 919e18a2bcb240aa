"""Grade an edited module by its tests, out of the reach of the module.

Two sandboxes without network: one runs pytest on a pristine copy of the tests, the other the edited module, and a pipe
carries calls and plain values between them. The module shares no process, file or exit code with the tests, so it can
forge no verdict: it can only answer calls. What the tests did not report as passed is failed, also when it is missing.

Limits of this: tests hand over plain values and functions only (no own objects), look at no global state of the
process (captured output, ``sys.modules``), and get lists and dicts of the module as copies. Tests that need more fail
on the pristine module too, so ``self_test`` refuses their scenario.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from pipeline import sandbox
from pipeline.files import ServerError
from pipeline.sandbox import INSIDE, PYTHON, Isolation, Limits
from pipeline.scenarios import MIN_GUARDS, Scenario, apply_edit, static_problems
from pipeline.swe_tests import STARTED

GRADING_LIMITS = Limits(wall_s=30.0, cpu_s=20, memory_mb=1024, processes=16, file_mb=4, tmp_mb=16, output_mb=1.0)


@dataclasses.dataclass(frozen=True)
class Grade:
    """What each test did. ``details`` explains failures to a person; an agent never sees it."""

    nodes: dict[str, str]
    details: dict[str, str]
    seconds: float

    def passed(self, node: str) -> bool:
        """Only what was reported as passed has passed: skipped, missing and failed are all the same."""
        return self.nodes.get(node) == "passed"


def grade(
    scenario: Scenario, module_code: str, *, isolation: Isolation | None = None, limits: Limits = GRADING_LIMITS
) -> Grade:
    """Run the scenario's tests on ``module_code``.

    Raises:
        ServerError: the sandbox itself could not run (never because of what the module did).
        InputError: there is no sandbox here.
    """
    isolation = isolation or sandbox.find_isolation()
    inside = isolation.kind == "bwrap"
    home = INSIDE if inside else os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    packages = sysconfig.get_paths()["purelib"]
    common = sandbox.project_binds("pipeline/swe_codec.py")
    with contextlib.ExitStack() as stack:
        shared_tmp = None if inside else stack.enter_context(tempfile.TemporaryDirectory(prefix="trace-grade-"))
        from_tests, to_candidate = stack.enter_context(_pipe())
        from_candidate, to_tests = stack.enter_context(_pipe())
        candidate = sandbox.start(
            [PYTHON, "-P", "-s", "-B", f"{home}/pipeline/swe_candidate.py"],
            isolation=isolation,
            limits=limits,
            binds=[*common, *sandbox.project_binds("pipeline/swe_candidate.py")],
            environment={"PYTHONPATH": home, "PYTHONHASHSEED": "0"},
            stdin=from_tests,
            stdout=to_tests,
        )
        stack.callback(sandbox.kill, candidate)
        os.close(from_tests)
        os.close(to_tests)
        job = {
            "module": scenario.module_name,
            "module_filename": scenario.module_filename,
            "module_code": module_code,
            "test_filename": scenario.test_filename,
            "test_code": scenario.test_code,
            "packages": f"{INSIDE}/packages" if inside else packages,
            "shared_tmp": shared_tmp,
        }
        finished = sandbox.run(
            [PYTHON, "-P", "-s", "-B", f"{home}/pipeline/swe_tests.py", str(from_candidate), str(to_candidate)],
            stdin=json.dumps(job).encode(),
            isolation=isolation,
            limits=limits,
            binds=[*common, *sandbox.project_binds("pipeline/swe_tests.py"), (packages, f"{INSIDE}/packages")],
            environment={"PYTHONPATH": home, "PYTHONHASHSEED": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            pass_fds=(from_candidate, to_candidate),
        )
    return _read(finished)


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose ends are closed at the end, where they are not closed yet."""
    ends = os.pipe()
    identity = [os.fstat(end).st_ino for end in ends]
    try:
        yield ends
    finally:
        for end, inode in zip(ends, identity, strict=True):
            with contextlib.suppress(OSError):
                if os.fstat(end).st_ino == inode:
                    os.close(end)


def _read(finished: sandbox.Finished) -> Grade:
    if finished.stopped is not None:  # the module hangs, or makes the tests hang: nothing has passed
        return Grade({}, {"run": f"stopped at {finished.stopped}"}, finished.seconds)
    started, mark, report = finished.stdout.partition(STARTED)
    try:
        data = json.loads(report if mark else started)
        return Grade(dict(data["nodes"]), dict(data["details"]), finished.seconds)
    except (ValueError, KeyError, TypeError, RecursionError):
        if mark:
            why = f"the tests ended their own process ({finished.returncode}) before they reported"
            return Grade({}, {"run": why}, finished.seconds)
        reason = finished.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no report"]
        if finished.returncode in (137, -9, 139, -11, 152, -24):  # killed: memory, a crash, CPU time
            return Grade({}, {"run": f"the tests were killed ({finished.returncode})"}, finished.seconds)
        raise ServerError(
            f"grading: the tests' sandbox failed ({reason[0][:200]}); try pipeline.swe_grading alone"
        ) from None


# --------------------------------------------------------------------------- reward


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What the tests do on the module as it is: which are targets, which are guards."""

    targets: tuple[str, ...]  # fail now; the right edit makes them pass
    guards: tuple[str, ...]  # pass now; an edit must keep them


@functools.lru_cache(maxsize=4096)
def _graded_before(key: tuple[str, str, str, str], isolation: Isolation) -> Grade:
    module_filename, module_code, test_filename, test_code = key
    fields = dict.fromkeys(("pr_description", "oracle_search", "oracle_replace", "naive_fix_description"), "-")
    files = {"module_filename": module_filename, "module_code": module_code, "test_filename": test_filename}
    scenario = Scenario(name="before", target_test="-", test_code=test_code, **files, **fields)
    return grade(scenario, module_code, isolation=isolation)


def graded_before(scenario: Scenario, isolation: Isolation | None = None) -> Grade:
    """The grade of the module as it is; run once per process."""
    key = (scenario.module_filename, scenario.module_code, scenario.test_filename, scenario.test_code)
    return _graded_before(key, isolation or sandbox.find_isolation())


def baseline(scenario: Scenario, isolation: Isolation | None = None) -> Baseline:
    """Targets and guards of a scenario."""
    nodes = graded_before(scenario, isolation).nodes
    return Baseline(
        targets=tuple(sorted(n for n, o in nodes.items() if scenario.is_target(n) and o != "passed")),
        guards=tuple(sorted(n for n, o in nodes.items() if not scenario.is_target(n) and o == "passed")),
    )


def reward(scenario: Scenario, result: Grade, isolation: Isolation | None = None) -> float:
    """Share of the target's cases that pass now, times the share of guards that still pass.

    An edit that repairs nothing earns 0, whatever else it keeps.
    """
    base = baseline(scenario, isolation)
    if not base.targets:
        return 0.0
    target = sum(result.passed(n) for n in base.targets) / len(base.targets)
    kept = sum(result.passed(n) for n in base.guards) / len(base.guards) if base.guards else 1.0
    return target * kept


# --------------------------------------------------------------------------- self-test


def self_test(scenario: Scenario, isolation: Isolation | None = None) -> list[str]:
    """What is wrong with a scenario, one sentence each; an empty list means that it can be trained on.

    The target fails before the oracle edit and passes after it, twice; at least 8 guards pass both times; doing nothing
    and the naive edit earn less than everything; nothing is given away.
    """
    problems = static_problems(scenario)
    if problems:
        return problems
    isolation = isolation or sandbox.find_isolation()
    before = graded_before(scenario, isolation)
    if "import" in before.details:
        return [f"the module does not import: {before.details['import'][:300]}"]
    if "run" in before.details:
        return [f"the tests cannot be run: {before.details['run']}"]
    base = baseline(scenario, isolation)
    if not base.targets:
        return [f"the target test {scenario.target_test} does not fail before the edit, or was not collected"]
    if len(base.guards) < MIN_GUARDS:
        failing = sorted(n for n in before.nodes if n not in base.guards and n not in base.targets)
        why = f" (failing: {', '.join(failing)}: {before.details.get(failing[0], '')[-300:]})" if failing else ""
        return [f"{len(base.guards)} guard tests pass before the edit; expected at least {MIN_GUARDS}{why}"]
    repaired = apply_edit(scenario.module_code, scenario.oracle_search, scenario.oracle_replace)
    codes = [repaired, repaired]
    if scenario.naive_search is not None and scenario.naive_replace is not None:
        codes.append(apply_edit(scenario.module_code, scenario.naive_search, scenario.naive_replace))
    with ThreadPoolExecutor(len(codes)) as pool:
        after = list(pool.map(lambda code: grade(scenario, code, isolation=isolation), codes))
    wanted = (*base.targets, *base.guards)
    for result in after[:2]:
        failed = [n for n in wanted if not result.passed(n)]
        if failed:
            detail = result.details.get(failed[0], result.details.get("import", "missing"))
            problems.append(f"after the oracle edit {failed[0]} does not pass: {detail[-300:]}")
            break
    if after[0].nodes != after[1].nodes:
        problems.append("the tests are not deterministic: two runs after the oracle edit differ")
    if len(after) > 2 and reward(scenario, after[2], isolation) >= 1.0:
        problems.append("the naive edit passes everything; the target or a guard must catch it")
    return problems
