"""One evaluation, of the base model (phase 1) or of a checkpoint (phase 6): agents, grading, summary.

Both phases call ``evaluate``, so they cannot differ in how they run; the ``Protocol`` that each records says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import run_server
from pydantic import BaseModel, ConfigDict, StrictStr
from run_accounting import Account, End, account, of_reports
from run_agent_config import shared_config
from run_agents import AgentRun, Outcome, outcome_of, read_outcomes, write_predictions
from run_dataset import Instance
from run_folder import RunFolder, agent_versions
from run_grading import Prediction, grade, harness_summary, raw_reports, read_predictions, regraded
from run_settings import RunSettings, digest

from pipeline.files import InputError, check, read_json, write_json
from pipeline.readers.swebench import Report


class Protocol(BaseModel):
    """Everything that must be equal for two evaluations to be comparable; instances are compared one by one."""

    model_config = ConfigDict(extra="forbid")
    agent: dict[str, Any]
    sampling: dict[str, Any]
    grading: dict[str, Any]
    server: dict[str, Any]
    versions: dict[str, StrictStr]

    def digest(self) -> str:
        return digest(self.model_dump(mode="json"))

    def differences(self, other: Protocol) -> list[str]:
        """Dotted names of the values that differ."""
        mine, theirs = (_flat(p.model_dump(mode="json")) for p in (self, other))
        return sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        out |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return out


def protocol_of(settings: RunSettings, config: Mapping[str, Any], server: Mapping[str, Any]) -> Protocol:
    """The protocol of the settings, the agents' shared configuration and ``server_facts``.

    Workers, retries, ports and the served name are no part of it.
    """
    return Protocol(
        agent={"backend": settings.agent.backend, "config": dict(config)},
        sampling=settings.sampling.model_dump(mode="json"),
        server=dict(server),
        grading={"backend": settings.grading.backend, "timeout_s": settings.grading.timeout_s},
        versions=agent_versions(settings),
    )


def server_facts(settings: RunSettings) -> dict[str, Any]:
    """What of the server decides results: the context length that it grants."""
    lengths = [entry.get("max_model_len") for entry in run_server.served(settings).values()]
    return {"max_model_len": max((n for n in lengths if isinstance(n, int)), default=None)}


class Summary(BaseModel):
    """``summary.json`` of an evaluation. ``instances``: digest of each instance's row; ``ends``: what became of it."""

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[1] = 1
    run_name: StrictStr
    name: StrictStr
    model: StrictStr
    checkpoint: StrictStr | None
    protocol: Protocol
    protocol_digest: StrictStr
    instances: dict[StrictStr, StrictStr]
    ends: dict[StrictStr, End]
    account: dict[str, Any]
    agents: dict[str, Any]
    harness: Any = None

    def to_account(self) -> Account:
        return Account(dict(self.ends))


def read_summary(path: Path) -> Summary:
    """Raises InputError when it is missing, does not fit, or its protocol or its ids were changed by hand."""
    if not path.exists():
        raise InputError(f"summary {path}: not found; run that evaluation to its end first")
    summary = check(Summary, read_json(path, "summary"), f"summary {path}")
    if summary.protocol.digest() != summary.protocol_digest:
        raise InputError(f"summary {path}: its protocol does not match its digest; run the evaluation again")
    if other := sorted(summary.ends.keys() ^ summary.instances.keys()):
        raise InputError(f"summary {path}: its instances and ends differ in {other[0]}; run the evaluation again")
    return summary


def verified_summary(path: Path, settings: RunSettings, instances: Sequence[Instance]) -> Summary:
    """A summary that follows from what the agents and the tests left: every step from there to it is made again.

    The trajectories give the outcomes, the outcomes the predictions; the tests' output gives, by the official code, the
    harness' reports, and these the ends and the account. Who also writes trajectories and test output by hand is not
    found out.

    Args:
        instances: the run's, whose rows say which tests decide.

    Raises:
        InputError: as ``read_summary``; or a file is missing, or says something else than what it follows from.
    """
    summary = read_summary(path)
    out, ids = path.parent, sorted(summary.ends)
    raw = read_json(out / "report.json", "report")
    if not isinstance(raw, dict):
        raise InputError(f"report {out / 'report.json'}: expected an object by id, found {type(raw).__name__}")
    reports = {i: check(Report, report, f"report of {i}") for i, report in raw.items()}
    predictions, outcomes = read_predictions(out / "preds.json"), read_outcomes(out, ids)
    value = account(ids, predictions, of_reports(reports), outcomes)
    if changed := [i for i in ids if summary.ends[i] != value.ends[i]]:
        i = changed[0]
        raise InputError(
            f"summary {path}: says {summary.ends[i]} of {i}, the files beside it {value.ends[i]}; "
            "run the evaluation again"
        )
    if summary.account != value.to_json():
        raise InputError(f"summary {path}: its account does not follow from its ends; run the evaluation again")
    _require_patches(out, predictions, outcomes)
    where = out / "grading"
    _require_same("report.json", reports, "the harness' own reports", raw_reports(where, predictions), where)
    graded = [i for i in instances if i.instance_id in reports]
    chosen = {i: p for i, p in predictions.items() if i in reports}
    again = regraded(settings, where, graded, chosen)
    _require_same("the harness' reports", reports, "the tests' output", again, where)
    return summary


def _require_patches(out: Path, predictions: Mapping[str, Prediction], outcomes: Mapping[str, Outcome]) -> None:
    """Raises InputError unless every patch is the one that the agent's trajectory ends with."""
    for i, outcome in outcomes.items():
        folder = out / "trajectories" / i
        seen = outcome_of(i, folder / f"{i}.traj.json", folder / "driver.log", outcome.seconds, outcome.attempts)
        if outcome.kind != "infrastructure" and (seen.kind, seen.patch) != (outcome.kind, outcome.patch):
            path = out / "outcomes" / f"{i}.json"
            raise InputError(
                f"outcome of {i} in {out}: does not follow from its trajectory; delete {path} and run the evaluation "
                "again"
            )
    for i, prediction in predictions.items():
        if i not in outcomes or (prediction.model_patch or "") != outcomes[i].patch:
            raise InputError(f"predictions {out / 'preds.json'}: {i} is not what its agent handed in; run it again")


def _require_same(what: str, said: Mapping[str, Report], source: str, made: Mapping[str, Report], where: Path) -> None:
    """Raises InputError unless both say the same of the same instances."""
    for i in sorted(said.keys() | made.keys()):
        pairs = [(r.resolved, r.patch_successfully_applied) if (r := side.get(i)) else None for side in (said, made)]
        if pairs[0] != pairs[1]:
            raise InputError(
                f"{where}: {what} does not follow from {source} for {i}; delete its folder there and run the "
                "evaluation again"
            )


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is evaluated: its name in the report, the name the server knows it by, and the checkpoint if any."""

    name: str
    served_name: str
    checkpoint: str | None = None


def evaluate(
    settings: RunSettings,
    folder: RunFolder,
    out: Path,
    instances: Sequence[Instance],
    subject: Subject,
    like: Protocol | None = None,
) -> Summary:
    """Run, grade and account; resumable at every point.

    Args:
        like: a protocol that this evaluation must have.

    Raises:
        InputError: ``out`` holds an evaluation under another protocol or of another model, or this one is not ``like``.
        ServerError: the server is not there, serves something else, or died.
    """
    config = shared_config(settings)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be made ({error.strerror}); move what is there away") from None
    ids = [i.instance_id for i in instances]
    unfinished = [i for i in ids if (o := read_outcomes(out, [i]).get(i)) is None or o.kind == "infrastructure"]
    if unfinished:
        run_server.require_served(settings, subject.served_name)
    known = _read_claim(out)
    server = server_facts(settings) if unfinished or known is None else known.protocol.server
    protocol = protocol_of(settings, config, server)
    if like is not None and (changed := like.differences(protocol)):
        raise InputError(f"{out}: differs from the base's evaluation in {', '.join(changed[:3])}; restore it")
    _claim(out, known, protocol, subject)
    outcomes = AgentRun(settings, folder, out, config, subject.served_name).run(instances) if unfinished else {}
    outcomes = outcomes or read_outcomes(out, ids)
    write_predictions(out, outcomes, subject.served_name)
    reports = grade(settings, folder, out, instances)
    value = account(ids, read_predictions(out / "preds.json"), of_reports(reports), outcomes)
    summary = Summary(
        run_name=settings.run_name,
        name=subject.name,
        model=subject.served_name,
        checkpoint=subject.checkpoint,
        protocol=protocol,
        protocol_digest=protocol.digest(),
        instances={i.instance_id: i.digest() for i in instances},
        ends=value.ends,
        account=value.to_json(),
        agents={
            "model_calls": sum(o.model_calls for o in outcomes.values()),
            "truncated_replies": sum(o.truncated for o in outcomes.values()),
            "seconds": round(sum(o.seconds for o in outcomes.values()), 1),
        },
        harness=harness_summary(out / "grading"),
    )
    write_json(out / "summary.json", summary.model_dump(mode="json"))
    return summary


class Claim(BaseModel):
    """``protocol.json``: what a folder is an evaluation of, written before the first agent runs."""

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[1] = 1
    model: StrictStr
    checkpoint: StrictStr | None
    protocol: Protocol


def _read_claim(out: Path) -> Claim | None:
    path = out / "protocol.json"
    return check(Claim, read_json(path, "protocol"), f"protocol {path}") if path.exists() else None


def _claim(out: Path, known: Claim | None, protocol: Protocol, subject: Subject) -> None:
    """Record what ``out`` is an evaluation of; refuse to mix two in one folder."""
    if known is None:
        claim = Claim(model=subject.served_name, checkpoint=subject.checkpoint, protocol=protocol)
        write_json(out / "protocol.json", claim.model_dump(mode="json"))
        return
    if changed := known.protocol.differences(protocol):
        shown = ", ".join(changed[:3])
        raise InputError(f"{out}: was begun with another {shown}; choose another --run-name or restore the setting")
    if (known.model, known.checkpoint) != (subject.served_name, subject.checkpoint):
        raise InputError(f"{out}: is an evaluation of {known.model}; choose another name")
