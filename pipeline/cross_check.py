"""Label runs against the summaries that they speak of: ids, outcomes, the split, and every quote."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from pipeline.files import InputError
from pipeline.labels import Evidence, LabelSet
from pipeline.records import Record, read_summaries


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the summaries say beyond the labels: trajectories outside every rate by reason, and quotes checked."""

    outside: dict[str, int]
    quotes: int


def labelable(record: Record) -> bool:
    """Passed or failed, with messages to judge by."""
    return record.outcome in ("passed", "failed") and bool(record.messages)


def squeeze(text: str) -> str:
    """Text with its white space normalised, for comparing quotes."""
    return " ".join(text.split())


def quote_fault(evidence: Evidence, texts: Mapping[int, str]) -> str:
    """What is wrong with a quote, the empty string when it is in its message.

    Args:
        texts: message index -> squeezed text.
    """
    if evidence.message not in texts:
        return f"there is no message {evidence.message}"
    if squeeze(evidence.quote) not in texts[evidence.message]:
        return f"message {evidence.message} does not contain {evidence.quote[:60]!r}"
    return ""


def message_texts(record: Record) -> dict[int, str]:
    return {m.index: squeeze(m.text()) for m in record.messages}


def cross_check(labels: LabelSet, summaries: str | Path, *, allow_score: bool = False) -> Facts:
    """Check ``labels`` against ``summaries``.

    Args:
        allow_score: accept labels for the ``score`` part of a split.

    Raises:
        InputError: names run, capability and id of the first disagreement.
    """
    failed = dict(zip(labels.ids, (bool(f) for f in labels.failed), strict=True))
    unseen = dict(failed)
    outside: Counter[str] = Counter()
    quotes = 0
    for record in read_summaries(summaries):
        if record.outcome is None:
            raise InputError(f"summaries {summaries}: is a blind file; give the one with outcomes")
        if record.id not in failed:
            if labelable(record) and record.split != "score":
                raise InputError(f"label runs: id {record.id!r} of {summaries} has no labels; label every trajectory")
            outside[_why_outside(record)] += 1
            continue
        del unseen[record.id]
        _check_outcome(record, failed[record.id], allow_score)
        quotes += _check_quotes(labels, record)
    for missing in unseen:
        raise InputError(f"label runs: unknown id {missing!r}: not in {summaries}")
    return Facts(dict(sorted(outside.items())), quotes)


def _why_outside(record: Record) -> str:
    if record.outcome == "infrastructure":
        return f"infrastructure: {record.fault or 'unknown'}"
    if record.outcome == "unknown":
        return "no verdict"
    return "no messages" if not record.messages else "score part of the split"


def _check_outcome(record: Record, failed: bool, allow_score: bool) -> None:
    named = "failed" if failed else "passed"
    if record.outcome != named:
        raise InputError(f"label runs: id {record.id!r} is {named} there and {record.outcome} in the summaries")
    if record.split == "score" and not allow_score:
        raise InputError(
            f"label runs: id {record.id!r} is in the score part of the split; label the mine part, or --allow-score-ids"
        )


def _check_quotes(labels: LabelSet, record: Record) -> int:
    cited = [
        (source, capability, by_id[record.id])
        for source, evidence in zip(labels.sources, labels.evidence, strict=True)
        for capability, by_id in evidence.items()
        if record.id in by_id
    ]
    texts = message_texts(record) if cited else {}
    for source, capability, evidence in cited:
        fault = quote_fault(evidence, texts)
        if fault:
            raise InputError(f"label run {source}: capability {capability}: id {record.id!r}: {fault}; quote verbatim")
    return len(cited)
