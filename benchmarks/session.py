"""Everything that one GPU must show, in order of value, within a time limit.

    LIMIT_S=560 bash benchmarks/gpu/session.sh          # see benchmarks/gpu_jobs.md
    python benchmarks/session.py --limit-s 300 --parts torch --work /tmp/trace_session --out runs/bench

First the timed steps without servers; beside them the models are made (by other cores, at low priority). Then all
servers start side by side, so that their starts do not add up; meanwhile only work runs that is no timing. Then every
timed step has the GPU for itself: the other servers are idle. Steps that no longer fit are named and left out, a step
that fails leaves the others their turn, and the next call with the same ``--work`` (or with ``--continue-from`` the
result of an earlier call) goes on with what is missing. ``OUT/session.json`` and ``OUT/session_logs.tar.gz`` are
rewritten after every step. Exit code 1: a step failed or was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_capabilities import machine
from benchmarks.gate_engine import ready_file
from benchmarks.serving import end
from benchmarks.session_plan import Plan, Task, choose, needed, session_plan
from benchmarks.session_report import publish, table
from pipeline.files import InputError, atomic_path, read_json, run_cli, write_json
from pipeline.ports import free_port

ROOT = Path(__file__).resolve().parent.parent
SERVICE_LIMIT_S = 330.0
MODEL_LIMIT_S = 240.0
RESERVE_S = 8.0  # for ending servers and packing the logs


class Session:
    """The state of one call: what runs, what is done, how much time is left."""

    def __init__(self, plan: Plan, work: Path, out: Path, limit_s: float, record: dict[str, Any]) -> None:
        self.plan, self.work, self.out, self.record = plan, work, out, record
        self.deadline = time.monotonic() + limit_s
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}  # services that were started
        self.urls: dict[str, str] = {}
        self.children: list[subprocess.Popen[bytes]] = []
        self.unmade: set[str] = set()  # models that could not be made
        self.ended = False
        self.lock = threading.RLock()  # of the record: models are made in a thread of their own
        for folder in (work / "results", work / "logs", out):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic() - RESERVE_S

    def made(self) -> list[str]:
        return [name for name in self.plan.models if (self.work / f"{name}.made").exists()]

    def ready(self) -> list[str]:
        return [name for name, entry in self.record["services"].items() if name in self.running and "ready_s" in entry]

    # ------------------------------------------------------------------ processes

    def launch(self, task: Task, log_name: str) -> subprocess.Popen[bytes]:
        """Start a task in a process group of its own; messages go to ``WORK/logs``."""
        values = {"python": sys.executable, **{f"url:{name}": url for name, url in self.urls.items()}}
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
        if task.name in self.plan.services:
            port = free_port()
            values["port"], self.urls[task.name] = str(port), f"http://127.0.0.1:{port}"
            env["VLLM_CACHE_ROOT"] = str(self.work / "vllm_cache" / task.name)  # they compile at the same time
        command = [_fill(part, values) for part in task.command]
        if task.name in self.plan.models:
            command = ["nice", "-n", "10", *command]
        with open(self.work / "logs" / f"{log_name}.log", "ab") as sink:
            process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=sink, stderr=sink, start_new_session=True)
        self.children.append(process)
        return process

    def say(self, text: str) -> None:
        print(f"[{self.remaining_s + RESERVE_S:4.0f} s left] {text}", flush=True)

    def is_ready(self, name: str) -> bool:
        if name.startswith("engine_"):
            return ready_file(self.go_file(name)).exists()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.urls[name]}/health", timeout=2):
            return True
        return False

    def go_file(self, name: str) -> Path:
        return self.work / f"{name.removeprefix('engine_')}.go"

    # ------------------------------------------------------------------ models, services and what runs beside them

    def make_models(self, names: Sequence[str]) -> None:
        """In a thread of its own: make models, side by side where they do not build on each other."""
        waiting, making = list(names), dict[str, tuple[subprocess.Popen[bytes], float]]()
        while (waiting or making) and self.remaining_s > 0 and not self.ended:
            for name in [n for n in waiting if set(self.plan.models[n].models) <= set(self.made())]:
                making[name] = (self.launch(self.plan.models[name], f"model_{name}"), time.monotonic())
                waiting.remove(name)
            for name, (process, begin) in list(making.items()):
                if process.poll() is not None or time.monotonic() - begin > MODEL_LIMIT_S:
                    end(process)
                    del making[name]
                    self._note_model(name, process.returncode, round(time.monotonic() - begin, 1))
            waiting = [n for n in waiting if not set(self.plan.models[n].models) & self.unmade]
            time.sleep(0.2)
        self.unmade |= set(names) - set(self.made())

    def _note_model(self, name: str, code: int, seconds: float) -> None:
        with self.lock:
            self.record["models"][name] = {"exit": code, "seconds": seconds}
        if code == 0:
            (self.work / f"{name}.made").touch()
        else:
            self.unmade.add(name)
        self.say(f"model {name}: exit {code}, {seconds} s (expected {self.plan.models[name].seconds})")

    def wait_for_models(self, names: Iterable[str]) -> None:
        while set(names) - set(self.made()) - self.unmade and self.remaining_s > 0:
            time.sleep(0.2)

    def start_services(self, chosen: Sequence[Task]) -> None:
        """Start the services of ``chosen`` as soon as their models are made, and run the steps that are no timings
        meanwhile; returns when all of it has ended well or badly."""
        waiting = needed(self.plan, chosen, ())[0]
        beside = [step for step in chosen if step.idle]
        step: tuple[Task, subprocess.Popen[bytes], float] | None = None
        while (waiting or beside) and self.remaining_s > 0:
            for name in [n for n in waiting if n not in self.running]:
                if set(self.plan.services[name].models) <= set(self.made()):
                    self._start_service(name)
            failed = self._watch_services(waiting)
            failed |= {n for n in waiting if set(self.plan.services[n].models) & self.unmade}
            waiting = [n for n in waiting if n not in failed and n not in self.ready()]
            if step is None and beside:
                step = (beside[0], self.launch(beside[0], beside[0].name), time.monotonic())
            if step is not None and (step[1].poll() is not None or time.monotonic() - step[2] > 3 * step[0].seconds):
                end(step[1])
                self.note(step[0], step[1].returncode, step[2], beside=True)
                beside.remove(step[0])
                step = None
            time.sleep(0.2)
        if step is not None:
            end(step[1], at_once=True)
            self.note(step[0], 124, step[2], beside=True)

    def _start_service(self, name: str) -> None:
        if name.startswith("engine_"):
            for file in (self.go_file(name), ready_file(self.go_file(name)), self.work / f"results/{name}.json"):
                file.unlink(missing_ok=True)
        self.running[name] = (self.launch(self.plan.services[name], f"service_{name}"), time.monotonic())
        self.record["services"][name] = {}

    def _watch_services(self, names: Iterable[str]) -> set[str]:
        """Note which of them answer now; returns those that ended or take too long."""
        failed = set()
        for name in [n for n in names if n in self.running and n not in self.ready()]:
            process, begin = self.running[name]
            seconds = round(time.monotonic() - begin, 1)
            if process.poll() is not None or seconds > SERVICE_LIMIT_S:
                end(process)
                failed.add(name)
                self.record["services"][name] = {"error": f"exit {process.poll()} after {seconds} s; see its log"}
                self.say(f"{name}: {self.record['services'][name]['error']}")
            elif self.is_ready(name):
                self.record["services"][name] = {"ready_s": seconds}
                self.say(f"{name}: ready after {seconds} s (expected {self.plan.services[name].seconds} alone)")
        return failed

    # ------------------------------------------------------------------ steps

    def run(self, step: Task) -> None:
        """One timed step, with all the GPU."""
        self.wait_for_models(step.models)
        missing = [name for name in step.services if name not in self.ready()]
        lacking = [name for name in step.models if name not in self.made()]
        if missing or lacking:
            self.record["left_out"][step.name] = f"{', '.join(missing + lacking)} did not start; see its log"
            self.say(f"{step.name}: left out, {self.record['left_out'][step.name]}")
            return
        begin, limit = time.monotonic(), max(1.0, min(2.5 * step.seconds + 30, self.remaining_s))
        process = self.launch(step, step.name)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            end(process)
        self.note(step, code, begin)

    def note(self, step: Task, code: int, begin: float, beside: bool = False) -> None:
        """Into the record: exit code, seconds, and whatever result there is."""
        seconds = round(time.monotonic() - begin, 1)
        entry: dict[str, Any] = {"exit": code, "seconds": seconds, "expected_s": step.seconds}
        if beside:
            entry["beside"] = "server starts"
        result = self.work / "results" / step.out
        if step.out and result.exists():
            try:
                entry["result"] = read_json(result, "result")
            except InputError as error:  # cut off in the middle of a write
                entry["result_error"] = str(error)
        self.record["steps"][step.name] = entry
        self.say(f"{step.name}: exit {code}, {seconds} s (expected {step.seconds})")
        if code != 0:
            print(_tail(self.work / "logs" / f"{step.name}.log"), flush=True)
        self.save()

    def end_services(self, keep: Iterable[str] = ()) -> None:
        for name in [n for n in self.running if n not in set(keep)]:
            end(self.running.pop(name)[0], at_once=True)  # with its workers; a server has nothing to save

    def end_everything(self) -> None:
        self.ended = True
        for process in self.children:
            if process.poll() is None:
                end(process, at_once=self.remaining_s < 0)
        self.running.clear()

    def save(self) -> None:
        with self.lock:
            self.record["results"] = table(self.record["steps"])
            write_json(self.work / "session.json", self.record)
            write_json(self.out / "session.json", self.record)
        with atomic_path(self.out / "session_logs.tar.gz") as temporary, tarfile.open(temporary, "w:gz") as tar:
            tar.add(self.work / "logs", "logs")


def _fill(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def _tail(log: Path, lines: int = 12) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def run_all(session: Session, steps: Sequence[Task]) -> None:
    """Timed steps without servers, then those with; what is left of the time decides again before each of them."""
    chosen = fitting(session, [s for s in steps if not s.optional])
    maker = threading.Thread(target=session.make_models, args=(needed(session.plan, chosen, session.made())[1],))
    maker.start()
    try:
        run_in_turn(session, [s for s in chosen if not s.services and not s.idle])
        for optional in (False, True):  # the optional ones on servers of their own
            wave = [s for s in steps if s.optional == optional and (s.services or s.idle)]
            if chosen := fitting(session, wave):
                session.start_services(chosen)
                run_in_turn(session, [s for s in chosen if not s.idle])
                session.end_services()
    finally:
        session.end_everything()
        maker.join()


def fitting(session: Session, steps: Sequence[Task]) -> list[Task]:
    """Those of ``steps`` that fit; the others are named and noted."""
    chosen, left_out = choose(session.plan, steps, session.remaining_s, session.made())
    for name, why in left_out.items():
        session.say(f"{name}: left out, {why}")
    session.record["left_out"] |= left_out
    return chosen


def run_in_turn(session: Session, steps: Sequence[Task]) -> None:
    for position, step in enumerate(steps):
        session.record["left_out"].pop(step.name, None)
        if step.seconds > session.remaining_s:
            why = f"needs about {step.seconds} s, {max(0, session.remaining_s):.0f} s are left"
            session.record["left_out"][step.name] = why
            session.say(f"{step.name}: left out, {why}")
            continue
        session.run(step)
        session.end_services(keep={name for later in steps[position + 1 :] for name in later.services})


def select(plan: Plan, parts: Sequence[str], names: Sequence[str], done: Iterable[str]) -> list[Task]:
    """The steps that are asked for and not done yet."""
    if unknown := set(parts) - {"torch", "serve"}:
        raise InputError(f"--parts {min(unknown)!r}: expected torch, serve or both")
    if unknown := set(names) - {s.name for s in plan.steps}:
        raise InputError(f"--steps {min(unknown)!r}: expected a comma list of {', '.join(s.name for s in plan.steps)}")
    kind = {s.name: "serve" if s.services or s.idle else "torch" for s in plan.steps}
    return [
        s for s in plan.steps if kind[s.name] in parts and (not names or s.name in names) and s.name not in set(done)
    ]


def earlier(paths: Iterable[Path | None], size: str) -> dict[str, Any]:
    """Steps that earlier calls finished well.

    Raises:
        InputError: they were of another size.
    """
    found: dict[str, Any] = {}
    for path in paths:
        if path is not None and path.exists():
            before = read_json(path, "earlier session")
            if before["size"] != size:
                raise InputError(f"{path}: a session of size {before['size']}, not {size}; give another --work")
            found |= {n: e for n, e in before["steps"].items() if e["exit"] == 0 and n not in found}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=560.0, help="of this call, all in all [%(default)s]")
    parser.add_argument("--size", choices=("gpu", "tiny"), default="gpu", help="tiny: on a CPU [%(default)s]")
    parser.add_argument("--parts", default="torch,serve", help="without and with vLLM [%(default)s]")
    parser.add_argument("--steps", default="", help="comma list [all]")
    parser.add_argument("--model", default="models/smollm2", help="a real one, for the gate's SFT [%(default)s]")
    parser.add_argument("--work", type=Path, default=Path("/tmp/trace_session"), help="models, logs [%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="[%(default)s]")
    parser.add_argument("--continue-from", type=Path, help="session.json of an earlier call on another machine")
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    parser.add_argument("--publish", type=Path, help="write the results of --continue-from into this folder, and end")
    args = parser.parse_args()
    if args.publish:
        if not args.continue_from:
            raise InputError("--publish needs --continue-from SESSION.json")
        print("\n".join(publish(read_json(args.continue_from, "session"), args.publish)))
        return 0
    work = args.work.resolve()
    plan = session_plan(args.size, str(work), str(Path(args.model).resolve()))
    done = earlier((work / "session.json", args.continue_from), args.size)
    steps = select(plan, args.parts.split(","), [n for n in args.steps.split(",") if n], done)
    record: dict[str, Any] = {
        "schema_version": 1, "benchmark": "session", "size": args.size, "limit_s": args.limit_s, "machine": machine(),
        "steps": done, "models": {}, "services": {}, "left_out": {},
    }  # fmt: skip
    if args.dry_run:
        chosen, left_out = choose(plan, [s for s in steps if not s.optional], args.limit_s - RESERVE_S)
        lines = [f"{name}: done before" for name in done] + [f"{s.name}: {s.seconds} s" for s in chosen]
        print("\n".join(lines + [f"{name}: {why}" for name, why in left_out.items()]))
        return 0
    if args.size == "tiny" and shutil.disk_usage(work.parent).free < 2**30:
        raise InputError(f"--work {work}: expected 1 GiB of free disk")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` ends us so; the servers must go too
    session = Session(plan, work, args.out, args.limit_s, record)
    try:
        run_all(session, steps)
    finally:
        session.save()
    print("\n".join(session.record["results"]["text"]))
    asked = [s.name for s in steps if not s.optional]
    return 0 if all(record["steps"].get(name, {"exit": 1})["exit"] == 0 for name in asked) else 1


if __name__ == "__main__":
    run_cli(main)
