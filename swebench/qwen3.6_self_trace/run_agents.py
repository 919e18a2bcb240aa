"""mini-swe-agent over the instances: several at a time, every end typed, nothing done twice.

An instance is finished when ``outcomes/<id>.json`` is there; it is written last. So a run that was killed
at any moment goes on where it was. Infrastructure errors (a dead server, a broken container, a crashed process) are
no ends: they are tried again, in this run and by the next one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import run_server
from pydantic import BaseModel, ConfigDict, StrictStr
from run_agent_config import LABEL, WITHOUT_IMAGE, agent_environment, instance_config, source_repository
from run_agent_worker import Workers
from run_dataset import Instance
from run_declared import git
from run_folder import RunFolder, agent_python
from run_settings import RunSettings, digest

from environment_calls import as_unicode
from pipeline.command_line import ProgressLine
from pipeline.files import InputError, ServerError, check, read_json, write_json

POLL_S = 0.2
WATCH_S = 15.0  # between looks at the server while agents run
WATCH_FAILURES = 3  # in a row, before the server counts as dead
HANG_MARGIN_S = 120.0  # over a wall limit, before an agent that does not end by itself is killed
DOCKER_TIMEOUT_S = 60.0
DETAIL_CHARS = 300

Kind = Literal["submitted", "empty_patch", "limit", "format", "infrastructure"]
LIMITS = re.compile(r"LimitsExceeded|TimeExceeded|ContextWindowExceededError")
FORMATS = re.compile(r"RepeatedFormatError|FormatError")
# vLLM's refusals of a prompt that leaves no room for an answer, which litellm calls bad requests
NO_ROOM = re.compile(r"maximum context length|max_(completion_)?tokens.{0,60}too large|longer than the maximum", re.S)


class Outcome(BaseModel):
    """How an instance ended. ``truncated``: replies that were cut at ``max_tokens``."""

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[1] = 1
    instance_id: StrictStr
    kind: Kind
    exit_status: StrictStr
    detail: StrictStr = ""
    patch: StrictStr = ""
    model_calls: int = 0
    truncated: int = 0
    seconds: float = 0.0
    attempts: int = 1


def classify(exit_status: str, submission: str, detail: str = "") -> Kind:
    """The kind of an end, from mini-swe-agent's exit status, its submission and the text of its exception."""
    if LIMITS.fullmatch(exit_status) or (exit_status == "BadRequestError" and NO_ROOM.search(detail)):
        return "limit"
    if FORMATS.fullmatch(exit_status):
        return "format"
    if exit_status == "Submitted":
        return "submitted" if submission.strip() else "empty_patch"
    return "infrastructure"


class MiniStats(BaseModel):
    model_config = ConfigDict(extra="ignore")
    api_calls: int | None = None


class MiniInfo(BaseModel):
    model_config = ConfigDict(extra="ignore")
    exit_status: StrictStr | None = None
    submission: StrictStr | None = None
    exception_str: StrictStr | None = None
    model_stats: MiniStats = MiniStats()


class MiniTrajectory(BaseModel):
    model_config = ConfigDict(extra="ignore")
    info: MiniInfo
    messages: list[dict[str, Any]]


def outcome_of(instance_id: str, trajectory: Path, log: Path, seconds: float, attempts: int) -> Outcome:
    """The end that a trajectory records; without one the process died, and its log says why."""
    common: dict[str, Any] = {"instance_id": instance_id, "seconds": round(seconds, 1), "attempts": attempts}
    try:
        data = check(MiniTrajectory, read_json(trajectory, "trajectory"), f"trajectory {trajectory}")
    except InputError:
        text = log.read_text(errors="replace").strip() if log.is_file() else ""
        last = text.splitlines()[-1] if text else "no message"
        return Outcome(kind="infrastructure", exit_status="NoTrajectory", detail=last[:DETAIL_CHARS], **common)
    info = data.info
    # a lone surrogate goes into no file: one agent must not stop a run
    patch, status, why = (as_unicode(t or "") for t in (info.submission, info.exit_status, info.exception_str))
    kind = classify(status, patch, why)
    return Outcome(
        kind=kind,
        exit_status=status,
        detail=why[:DETAIL_CHARS],
        patch=patch if kind == "submitted" else "",
        model_calls=info.model_stats.api_calls or 0,
        truncated=sum(_finish_reason(m) == "length" for m in data.messages),
        **common,
    )


def _finish_reason(message: Mapping[str, Any]) -> str | None:
    extra = message.get("extra")
    response = extra.get("response") if isinstance(extra, dict) else None
    choices = response.get("choices") if isinstance(response, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first.get("finish_reason") if isinstance(first, dict) else None


def read_outcomes(out: Path, ids: Sequence[str]) -> dict[str, Outcome]:
    """The finished instances among ``ids``.

    Raises:
        InputError: a file that does not fit, or that is another instance's.
    """
    found = {}
    for instance_id in ids:
        path = out / "outcomes" / f"{instance_id}.json"
        if path.exists():
            outcome = check(Outcome, read_json(path, "outcome"), f"outcome {path}")
            if outcome.instance_id != instance_id:
                raise InputError(f"outcome {path}: is of {outcome.instance_id!r:.80}; delete it and run again")
            found[instance_id] = outcome
    return found


def write_predictions(out: Path, outcomes: Mapping[str, Outcome], model: str) -> None:
    """``preds.json`` as the harness reads it: every instance that ended, with an empty patch where it made none."""
    predictions = {
        i: {"model_name_or_path": model, "instance_id": i, "model_patch": outcome.patch}
        for i, outcome in sorted(outcomes.items())
    }
    write_json(out / "preds.json", predictions)


class AgentRun:
    """The agents of one evaluation. ``config``: what ``shared_config`` returned."""

    def __init__(
        self, settings: RunSettings, folder: RunFolder, out: Path, config: dict[str, Any], served_name: str
    ) -> None:
        self.settings, self.folder, self.out = settings, folder, out
        self.config, self.served_name = config, served_name
        self.sandboxes = Path(os.environ.get("TMPDIR") or out / "work") / f"trace-{digest(str(out.resolve()))[:12]}"
        self.workers = Workers(agent_python(settings), self._environment(), out / "work")
        self._stop = threading.Event()
        self._dead: ServerError | None = None

    def run(self, instances: Sequence[Instance]) -> dict[str, Outcome]:
        """Run what is not finished yet; all outcomes, with infrastructure errors where every try failed.

        Raises:
            ServerError: the server died. What is finished is kept.
        """
        ids = [i.instance_id for i in instances]
        done = read_outcomes(self.out, ids)
        todo = [i for i in instances if done.get(i.instance_id, _UNFINISHED).kind == "infrastructure"]
        progress = ProgressLine("agents", len(ids))
        progress.advance(len(ids) - len(todo))
        pool = concurrent.futures.ThreadPoolExecutor(self.settings.agent.workers)
        self._drop_sandboxes()
        try:
            waiting = {pool.submit(self._one, instance) for instance in todo}
            self._collect(waiting, done, progress)
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)
            self.workers.kill()
            self._drop_sandboxes()
            progress.close()
        if self._dead is not None:
            raise self._dead
        return done

    def _collect(
        self,
        waiting: set[concurrent.futures.Future[Outcome | None]],
        done: dict[str, Outcome],
        progress: ProgressLine,
    ) -> None:
        failures = 0
        looked = time.monotonic()
        while waiting and not self._stop.is_set():
            ended, waiting = concurrent.futures.wait(waiting, POLL_S, concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                if (outcome := future.result()) is not None:
                    done[outcome.instance_id] = outcome
                    progress.advance(note=f"{outcome.instance_id}: {outcome.kind}")
            if time.monotonic() - looked > WATCH_S:
                failures = 0 if run_server.alive(self.settings) else failures + 1
                looked = time.monotonic()
                if failures >= WATCH_FAILURES:
                    self._server_died()

    def _server_died(self) -> None:
        if self._dead is None:
            url = self.settings.model.base_url
            self._dead = ServerError(f"server {url}: died while agents ran; start it and run the phase again to go on")
        self._stop.set()

    def _one(self, instance: Instance) -> Outcome | None:
        """One instance to its end; None when the run is being stopped."""
        outcome = _UNFINISHED
        for attempt in range(1, 2 + self.settings.agent.infrastructure_retries):
            ended = None if self._stop.is_set() else self._attempt(instance, attempt)
            if ended is None:
                return None
            outcome = ended
            if outcome.kind != "infrastructure":
                break
        if outcome.kind == "infrastructure" and not run_server.alive(self.settings):
            self._server_died()
            return None
        return self._keep(outcome)

    def _attempt(self, instance: Instance, attempt: int) -> Outcome | None:
        name = instance.instance_id
        work = self.out / "work" / name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        if self.settings.agent.backend in WITHOUT_IMAGE:
            working_copy(source_repository(self.settings, self.folder, name), instance.base_commit, work / "testbed")
        write_json(work / "job.json", self.job(instance, work))
        began = time.monotonic()
        if not self._drive(work, name):
            return None
        trajectory = work / "output" / name / f"{name}.traj.json"
        return outcome_of(name, trajectory, work / "driver.log", time.monotonic() - began, attempt)

    def job(self, instance: Instance, work: Path) -> dict[str, Any]:
        """What the driver is told about an instance."""
        config = instance_config(self.config, self.settings, self.served_name, instance.instance_id, work / "testbed")
        row = instance.row()
        if row.get("image") and not row.get("image_name"):
            row["image_name"] = row["image"]  # the image that the harness will grade in
        return {"instance": row, "config": config, "output": str(work / "output"), "log": str(work / "driver.log")}

    def _drive(self, work: Path, name: str) -> bool:
        """Run the job to its end; False when the run is being stopped."""
        self._remove_containers(name)
        wall = self.settings.agent.wall_time_limit_s
        margin = HANG_MARGIN_S + self.settings.agent.command_timeout_s + self.settings.agent.request_timeout_s
        ended = self.workers.mine().run(work / "job.json", self._stop, wall + margin if wall else math.inf)
        if ended != "over":
            self._remove_containers(name)
        return ended != "stopped"

    def _environment(self) -> dict[str, str]:
        env = agent_environment() | {"MSWEA_GLOBAL_CONFIG_DIR": str(self.out / "work" / "config")}
        env["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = str(self.settings.agent.request_attempts)
        if self.settings.agent.backend == "singularity":
            env["TMPDIR"] = str(self.sandboxes)  # the package unpacks the images there
        if key := os.environ.get(self.settings.model.api_key_env):
            env["HOSTED_VLLM_API_KEY"] = key
        return env

    def _drop_sandboxes(self) -> None:
        """Remove the unpacked images (some GiB each) that killed processes left behind; an empty place for new ones."""
        shutil.rmtree(self.sandboxes, ignore_errors=True)
        if self.settings.agent.backend == "singularity" and not self._stop.is_set():
            self.sandboxes.mkdir(parents=True)

    def _remove_containers(self, name: str) -> None:
        """Containers of this instance that an earlier, killed run left behind."""
        if self.settings.agent.backend != "docker":
            return
        docker = os.environ.get("MSWEA_DOCKER_EXECUTABLE", "docker")
        label = f"label={LABEL}={self.settings.run_name}.{name}"
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            listed = subprocess.run(
                [docker, "ps", "-aq", "--filter", label], capture_output=True, text=True, timeout=DOCKER_TIMEOUT_S
            )
            if ids := listed.stdout.split():
                subprocess.run([docker, "rm", "-f", *ids], capture_output=True, timeout=DOCKER_TIMEOUT_S)

    def _keep(self, outcome: Outcome) -> Outcome:
        name = outcome.instance_id
        work, kept = self.out / "work" / name, self.out / "trajectories" / name
        kept.mkdir(parents=True, exist_ok=True)
        for source in (work / "output" / name / f"{name}.traj.json", work / "driver.log"):
            if source.exists():
                os.replace(source, kept / source.name)
        write_json(self.out / "outcomes" / f"{name}.json", outcome.model_dump(mode="json"))
        shutil.rmtree(work, ignore_errors=True)
        return outcome


_UNFINISHED = Outcome(instance_id="", kind="infrastructure", exit_status="not run")


def working_copy(repository: Path, commit: str, target: Path) -> None:
    """The files of ``commit`` as a new repository with one commit: what came after it cannot be looked up.

    Raises:
        InputError: the repository lacks the commit.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    index = {"GIT_INDEX_FILE": str(target.parent / "index.tmp")}
    git(repository, "read-tree", commit, env=index)
    git(repository, "checkout-index", "-a", "-f", f"--prefix={target}/", env=index)
    (target.parent / "index.tmp").unlink(missing_ok=True)
    git(target, "init", "-q", "--template=")
    git(target, "add", "-A", "-f")
    git(target, "commit", "-q", "--allow-empty", "-m", f"base {commit}")
