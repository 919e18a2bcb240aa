"""Train the gates on labelled episodes: which capability, in every layer, at every token.

    python -m train.train_router_sft --config configs/moe_gate.yaml

The backbone and the adapters are frozen. Round 1 takes the hidden states under teacher-forced routes, further rounds
those under the gates' own routes (``train/gate_features.py``); each round trains all gates on the kept features
(``train/gate_fit.py``). Labels cover, by default, all tokens of an episode: at inference the gates see the prompt too,
and the keys and values of prompt tokens depend on their routes.

Writes ``<output_dir>/gate.safetensors`` (``moe_gate.load_routed`` reads it), ``metrics.jsonl``, ``report.json``,
``config.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_gate import build_capability_model, find_adapter, named_gater_parameters, routing_state, save_gate
from moe_gate.config import GateConfig, load_gate_config
from pipeline.files import InputError, JsonlLog, write_json
from train.chat import ChatCodec
from train.distributed import Ranks, held_folder, join_ranks, run_ranks
from train.gate_data import GateData, LabelledEpisode, listed, load_gate_data
from train.gate_features import FeatureSet, collect_features
from train.gate_fit import (
    FitSettings,
    GateFit,
    GateScore,
    balance,
    batch_of,
    feature_scale,
    rows_by_episode,
    score_gates,
)
from train.gate_state import load_state, save_state

PASSES = 3  # over the data, when total_steps is 0 (published: 3 epochs)


class RouterTrainer:
    """The rounds of one run. ``config`` says everything; see ``moe_gate/config.py``."""

    def __init__(self, config: GateConfig, data: GateData, model: Any, ranks: Ranks, resume: bool) -> None:
        self.config, self.data, self.model, self.ranks = config, data, model, ranks
        self.folder = Path(config.output_dir)
        self.gates = [p for _, p in named_gater_parameters(model)]
        self.steps = config.total_steps or math.ceil(PASSES * len(data.train) / self._batch_size)
        self.rounds = 1 + config.on_policy_rounds
        tokens = sum(len(episode.token_ids) for episode in data.train)
        fewest = min(len(data.train), len(data.validation)) // (2 * ranks.world)  # no rank may go without
        self.on_policy_stride = max(1, min(round(tokens / config.on_policy_tokens), fewest))
        self.identity = _identity(config, data)
        self.state = load_state(self.folder / "state.safetensors", self.identity) if resume else None
        self.log = JsonlLog(self.folder / "metrics.jsonl") if ranks.rank == 0 else None
        self.begin = time.monotonic()

    @property
    def _batch_size(self) -> int:
        return min(self.config.batch_size * self.config.gradient_accumulation, len(self.data.train))

    def run(self) -> GateScore:
        """All rounds, then the validation on the gates' own routes; the gates of the model are the trained ones."""
        first = 0
        if self.state is not None:
            first = self.state.round
            self._put(self.state.start_weight, self.state.start_bias)
        for round_index in range(first, self.rounds):
            forced = round_index == 0
            what = f"round {round_index + 1}/{self.rounds} {'teacher-forced' if forced else 'on-policy'}"
            stride = 1 if forced else self.on_policy_stride
            train, validation = self.data.train[::stride], self.data.validation[::stride]
            features = self._features(train, forced, f"{what} features")
            self._round(round_index, len(train), features, self._features(validation, forced, f"{what} validation"))
        final = self._features(self.data.validation[:: self.on_policy_stride], False, "final validation")
        weight, bias = self._gates()
        score = score_gates(weight, bias, final)
        self._record({"event": "final", "accuracy": score.accuracy, "loss": score.loss})
        return score

    def _round(self, index: int, n_episodes: int, train: FeatureSet, validation: FeatureSet) -> None:
        weight, bias = self._gates()
        fit = GateFit(weight, bias, feature_scale(train), self._settings(index))
        if self.state is not None and self.state.round == index:
            self.state.restore(fit)
            self.state = None
        rows = rows_by_episode(train, len(range(self.ranks.rank, n_episodes, self.ranks.world)))
        size = min(self._batch_size, n_episodes)
        while not fit.finished:
            chosen = batch_of(fit.step, n_episodes, size, fit.settings.seed)
            mine = [e // self.ranks.world for e in chosen if e % self.ranks.world == self.ranks.rank]
            loss = fit.train_step(train, rows, mine, size / n_episodes)
            if fit.step % self.config.eval_every == 0 or fit.step >= fit.settings.steps:
                score = score_gates(*fit.weights(), validation)
                fit.keep_best(score)
                self._record(
                    {"event": "eval", "round": index + 1, "step": fit.step, "train_loss": loss,
                     "validation_loss": score.loss, "validation_accuracy": score.accuracy}
                )  # fmt: skip
                if self.ranks.rank == 0:
                    save_state(self.folder / "state.safetensors", self.identity, index, fit, weight, bias)
        self._put(*fit.best)

    def _settings(self, round_index: int) -> FitSettings:
        c = self.config
        return FitSettings(
            self.steps, self._batch_size, c.lr, c.bias_lr, c.weight_decay, c.warmup_steps, c.load_balance_coef,
            c.eval_every, c.patience, c.seed + 1000 * round_index,
        )  # fmt: skip

    def _features(self, episodes: Sequence[LabelledEpisode], forced: bool, what: str) -> FeatureSet:
        progress = _Progress(what) if self.ranks.rank == 0 else None
        features = collect_features(
            self.model,
            self.ranks.mine(episodes),
            forced=forced,
            label_tokens=self.config.label_tokens,
            batch_size=self.config.forward_batch_size,
            progress=progress,
        )
        return balance(features, routing_state(self.model).num_slots)

    def _gates(self) -> tuple[Tensor, Tensor]:
        """``W [L, S, H]`` and ``b [L, S]`` of the model's gates, on the CPU."""
        cpu = [parameter.detach().float().cpu() for parameter in self.gates]
        return torch.stack(cpu[0::2]), torch.stack(cpu[1::2])

    def _put(self, weight: Tensor, bias: Tensor) -> None:
        with torch.no_grad():
            for layer, (w, b) in enumerate(zip(weight, bias, strict=True)):
                self.gates[2 * layer].copy_(w)
                self.gates[2 * layer + 1].copy_(b)

    def _record(self, record: dict[str, Any]) -> None:
        if self.log is None:
            return
        self.log.append(record | {"seconds": round(time.monotonic() - self.begin, 2)})
        if record["event"] == "eval":
            sys.stderr.write(
                f"round {record['round']} step {record['step']}/{self.steps}: loss {record['train_loss']:.4f}, "
                f"validation loss {record['validation_loss']:.4f}, accuracy {record['validation_accuracy']:.3f}\n"
            )


class _Progress:
    """A line with tokens done, at most every two seconds."""

    def __init__(self, what: str) -> None:
        self.what, self.begin, self.last = what, time.monotonic(), 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.last > 2.0 or done == total:
            self.last = now
            sys.stderr.write(f"{self.what}: {done}/{total} tokens, {now - self.begin:.1f} s\n")


def _identity(config: GateConfig, data: GateData) -> str:
    """Digest of everything that a saved state depends on; a state of another run is not resumed."""
    settings = config.model_dump(exclude={"output_dir", "run_name", "vllm", "grpo", "forward_batch_size"})
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for episode in (*data.train, *data.validation):
        digest.update(repr((episode.slot, episode.token_ids, episode.action_mask, episode.undecided)).encode())
    return digest.hexdigest()


def build_model(config: GateConfig) -> Any:
    """The untrained routed model of a configuration, in eval mode, on the GPU of this rank where there is one.

    Raises:
        InputError: base or adapters missing or not fitting.
    """
    adapters = {name: str(find_adapter(config.adapter_dir, name)) for name in config.adapter_names}
    model = build_capability_model(
        config.base_model,
        adapters,
        routing_scope=config.routing_scope,
        routing_granularity=config.routing_granularity,
        routing_mode=config.routing_mode,
        include_base_slot=config.include_base_slot,
        base_bias=config.base_bias,
        global_layer=config.global_layer,
        target_modules=config.target_modules,
        dtype=config.dtype,
    )
    if torch.cuda.is_available():
        model.to(f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}")
    return model.eval()


def report_of(config: GateConfig, data: GateData, model: Any, score: GateScore, seconds: float) -> dict[str, Any]:
    """``report.json``: validation on the gates' own routes, with the confusion matrix by capability name."""
    names = list(routing_state(model).slot_names)
    return {
        "schema_version": 1,
        "run_name": config.run_name,
        "slot_names": names,
        "train_episodes": {name: sum(e.slot == i for e in data.train) for i, name in enumerate(names)},
        "validation_episodes": {name: sum(e.slot == i for e in data.validation) for i, name in enumerate(names)},
        "skipped": data.skipped,
        "validation_accuracy": score.accuracy,
        "validation_loss": score.loss,
        "accuracy_of_layer": score.accuracy_of_layer,
        "confusion": {
            label: dict(zip(names, row, strict=True)) for label, row in zip(names, score.confusion, strict=True)
        },
        "seconds": round(seconds, 2),
    }


def print_report(report: dict[str, Any]) -> None:
    """Accuracy and the confusion matrix in rows of shares."""
    names = report["slot_names"]
    print(f"validation accuracy on the gate's own routes: {report['validation_accuracy']:.3f} (over layers and tokens)")
    width = max(len(name) for name in [*names, "label \\ route"])
    print(f"{'label / route':<{width}}  " + "  ".join(f"{name:>{max(6, len(name))}}" for name in names))
    for label in names:
        row = report["confusion"][label]
        total = sum(row.values())
        if total:
            print(f"{label:<{width}}  " + "  ".join(f"{row[name] / total:>{max(6, len(name))}.3f}" for name in names))
    used = {name for row in report["confusion"].values() for name in names if row[name]}
    if len(used) == 1:
        print(f"warning: every token goes to {used.pop()}: this gate composes nothing; give it more data or epochs")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="configs/moe_gate.yaml")
    parser.add_argument("--output-dir", help="instead of the configuration's output_dir")
    parser.add_argument(
        "--resume", action="store_true", help="go on from <output_dir>/state.safetensors where it is there"
    )
    args = parser.parse_args(arguments)
    config = load_gate_config(args.config, {"output_dir": args.output_dir} if args.output_dir else None)
    with held_folder(config.output_dir):
        ranks, _ = join_ranks("cpu")  # the features that are summed over ranks lie there
        try:
            return train_gate(config, ranks, args.resume)
        finally:
            ranks.close()


def train_gate(config: GateConfig, ranks: Ranks, resume: bool) -> int:
    """The whole run on this rank; its exit code."""
    begin = time.monotonic()
    torch.manual_seed(config.seed)
    data = load_gate_data(config, ChatCodec.from_model(config.base_model))
    if ranks.world > min(len(data.train), len(data.validation)):
        raise InputError(f"{ranks.world} processes for {len(data.validation)} validation episodes; start fewer")
    model = build_model(config)
    folder = Path(config.output_dir)
    if ranks.rank == 0:
        write_json(folder / "config.json", config.model_dump())
        if data.skipped:
            sys.stderr.write(f"left out: {listed(data.skipped)}\n")
    score = RouterTrainer(config, data, model, ranks, resume).run()
    if ranks.rank == 0:
        report = report_of(config, data, model, score, time.monotonic() - begin)
        save_gate(
            model,
            folder,
            config.base_model,
            {k: report[k] for k in ("validation_accuracy", "train_episodes", "confusion")},
        )
        write_json(folder / "report.json", report)
        print_report(report)
        print(f"{folder / 'gate.safetensors'}: {len(data.train)} training episodes, {report['seconds']:.1f} s")
    return 0


if __name__ == "__main__":
    run_ranks(main)
