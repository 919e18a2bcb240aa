"""What a training run leaves behind: metrics, events, a progress line, and warnings that a person understands."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any, TextIO

from pipeline.files import InputError, JsonlLog, read_jsonl, write_text

PATIENCE = 3  # iterations in a row before a warning
SHOWN_EVENTS = ("server lost", "server back")


class Tracker:
    """Optional metric back ends; JSONL is always written.

    Raises:
        InputError: a back end is asked for that is not installed or not known.
    """

    def __init__(self, names: tuple[str, ...], folder: Path, config: dict[str, Any]) -> None:
        self._writers: list[Any] = []
        for name in names:
            try:
                self._writers.append(self._open(name, folder, config))
            except ImportError:
                raise InputError(f"--report-to {name}: the package is not installed; pip install {name}") from None

    @staticmethod
    def _open(name: str, folder: Path, config: dict[str, Any]) -> Any:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer = SummaryWriter(str(folder / "tensorboard"))

            def write(values: dict[str, float], step: int) -> None:
                for key, value in values.items():
                    writer.add_scalar(key, value, step)

            return write
        if name == "trackio":
            import trackio

            trackio.init(project="trace", config=config)
            return lambda values, step: trackio.log(values)
        if name == "wandb":
            import wandb

            run = wandb.init(project="trace", config=config, dir=str(folder))
            return lambda values, step: run.log(values, step=step)
        raise InputError(f"--report-to {name}: expected tensorboard, trackio or wandb")

    def log(self, values: dict[str, float], step: int) -> None:
        for write in self._writers:
            write(values, step)


class RunLog:
    """``metrics.jsonl`` and the progress line of one run.

    Args:
        resume_from: adapter -> iteration to go on from; later lines of an interrupted run are dropped.
    """

    def __init__(
        self, folder: Path, resume_from: dict[str, int], tracker: Tracker | None = None, stream: TextIO | None = None
    ) -> None:
        path = folder / "metrics.jsonl"
        kept: list[Any] = []
        if path.exists():
            kept = [
                record
                for record in read_jsonl(path, "metrics", torn_tail_ok=True)
                if record.get("iteration", 0) <= resume_from.get(record.get("adapter", ""), 0)
            ]
        write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
        self._log = JsonlLog(path)
        self._events_path = folder / "events.jsonl"
        self._events: JsonlLog | None = None
        self._closed = False
        self._tracker = tracker
        self._stream = stream or sys.stderr
        self._begin = time.perf_counter()
        self._recent: dict[str, deque[dict[str, float]]] = defaultdict(lambda: deque(maxlen=PATIENCE))
        for record in kept:  # a resumed run warns where an uninterrupted one would
            if "reward" in record:
                self._warnings(record["adapter"], record)

    def say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def iteration(
        self, adapter: str, iteration: int, last: int, metrics: dict[str, float], errors: dict[str, int]
    ) -> None:
        """Record one iteration and show its line. What is not finite stays out: it is no JSON, and no number either."""
        metrics = {key: value for key, value in metrics.items() if math.isfinite(value)}
        elapsed = time.perf_counter() - self._begin
        record: dict[str, Any] = {"adapter": adapter, "iteration": iteration, "elapsed_s": round(elapsed, 3), **metrics}
        if errors:
            record["error_kinds"] = errors
        self._log.append(record)
        if self._tracker is not None:
            self._tracker.log({f"{adapter}/{k}": v for k, v in metrics.items()}, iteration)
        rate = metrics["sampled_tokens"] / max(metrics["sample_s"], 1e-9)
        self.say(
            f"[{adapter} {iteration}/{last}] reward {metrics['reward']:.3f} success {metrics['success']:.2f} "
            f"informative {metrics['informative']:.2f} entropy {metrics.get('entropy', 0.0):.3f} "
            f"| {rate:.0f} tok/s | sample {metrics['sample_s']:.1f}s update {metrics['update_s']:.1f}s "
            f"deliver {metrics['deliver_s']:.2f}s" + (f" | errors {errors}" if errors else "")
        )
        for warning in self._warnings(adapter, metrics):
            self._log.append({"adapter": adapter, "iteration": iteration, "warning": warning})
            self.say(f"[{adapter} {iteration}/{last}] warning: {warning}")

    def evaluation(self, adapter: str, iteration: int, values: dict[str, float]) -> None:
        self._log.append({"adapter": adapter, "iteration": iteration, **{f"eval_{k}": v for k, v in values.items()}})
        self.say(f"[{adapter} {iteration}] held out: " + " ".join(f"{k} {v:.3f}" for k, v in values.items()))

    def event(self, record: dict[str, Any]) -> None:
        """Append to ``events.jsonl`` what happened beside the iterations (adapters, servers), with the time of day."""
        if self._closed:  # what goes on while everything is being put away
            return
        if self._events is None:
            self._events = JsonlLog(self._events_path)
        self._events.append({"time": round(time.time(), 3), **record})
        if record["event"] in SHOWN_EVENTS:
            self.say(f"{record['event']}: {record['server']}" + (f" ({record['why']})" if "why" in record else ""))

    def _warnings(self, adapter: str, metrics: dict[str, float]) -> list[str]:
        found = []
        if metrics.get("nonfinite"):
            found.append("loss or gradient is not finite: this update was skipped, the weights are as before")
        recent = self._recent[adapter]
        recent.append(metrics)
        if len(recent) == PATIENCE:
            lasting = lasting_faults(list(recent))
            found += lasting
            if lasting:
                recent.clear()  # say it again only after another PATIENCE iterations
        return found

    def close(self) -> None:
        self._closed = True
        self._log.close()
        if self._events is not None:
            self._events.close()


def lasting_faults(recent: list[dict[str, float]]) -> list[str]:
    """What has been wrong in each of these iterations, in words that say what to do."""
    last, n = recent[-1], len(recent)
    found = []
    if all(m["constant_high"] >= 0.9 for m in recent):
        found.append(
            f"at least 90 % of groups all succeed alike for {n} iterations: the environment is too easy "
            f"(reward {last['reward']:.2f}); mutate it or stop here"
        )
    if all(m["constant_low"] >= 0.9 for m in recent):
        found.append(
            f"at least 90 % of groups all fail alike for {n} iterations: the environment is too hard "
            f"(reward {last['reward']:.2f}); make easier seeds or use hints"
        )
    if all(m["truncated"] >= 0.2 for m in recent):
        found.append(f"{last['truncated']:.0%} of episodes are cut: raise --max-new-tokens or --max-seq-length")
    if all(m["errors"] >= 0.05 for m in recent):
        found.append(f"{last['errors']:.0%} of episodes fail outside the policy: see error_kinds in metrics.jsonl")
    if all(m.get("mismatch_outside", 0.0) >= 0.05 for m in recent):
        found.append(
            f"{last['mismatch_outside']:.0%} of sampled tokens have a trainer/sampler ratio outside [0.5, 2]: "
            "same base and dtype on both sides?"
        )
    if all(m.get("entropy", 1.0) < 0.02 for m in recent):
        found.append("entropy is below 0.02 nats per token: the policy no longer explores")
    return found


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if re.fullmatch(r"iter_\d{6}", p.name) and (p / "state.json").is_file())
