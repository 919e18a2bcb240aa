"""Warm start of the gates from measured rewards: which adapter does best on which task, softly.

    python -m train.warmstart_gater --config configs/moe_gate.yaml --rollouts 'runs/probe/*.json'

The files hold rollouts of the base and of every adapter on the same seeds of any registered environments (collect them
with ``python -m train.collect_rollouts --adapter ...``, with tokens). For each (environment, seed) with the mean
reward r_s of every slot s that was measured:

    target_s = exp(r_s / tau) / sum_s' exp(r_s' / tau)          slots that were not measured: 0

Seeds on which no slot does better than another teach nothing and are left out. The gates are trained towards the target
on the best slot's best episode, as in ``train.train_router_sft`` (same features, fit, resume, outputs).
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_gate import save_gate
from moe_gate.config import GateConfig, load_gate_config
from pipeline.files import InputError, check, read_json, write_json
from train.chat import ChatCodec
from train.distributed import Ranks, held_folder, join_ranks, run_ranks
from train.gate_data import GateData, LabelledEpisode, RolloutRecord, adapter_name, mark_undecided, tokens_of
from train.train_router_sft import RouterTrainer, build_model, print_report, report_of

Task = tuple[str, str]  # environment, seed


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One measured episode of one slot."""

    reward: float
    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    source: str


def soft_target(mean_rewards: dict[int, float], num_slots: int, tau: float) -> tuple[float, ...]:
    """softmax(r / tau) over the measured slots, 0 elsewhere.

    Args:
        mean_rewards: slot -> mean reward.
        tau: reward difference that makes a slot e times as likely; > 0.
    """
    highest = max(mean_rewards.values())
    powers = {slot: math.exp((reward - highest) / tau) for slot, reward in mean_rewards.items()}
    total = sum(powers.values())
    return tuple(powers.get(slot, 0.0) / total for slot in range(num_slots))


def read_attempts(paths: Iterable[str], config: GateConfig, codec: ChatCodec) -> dict[Task, dict[int, list[Attempt]]]:
    """Scored episodes by task and slot; an entry without an adapter is the base's.

    Raises:
        InputError: a file or entry that cannot be read, or an adapter without a slot.
    """
    slots = {name: i + int(config.include_base_slot) for i, name in enumerate(config.adapter_names)}
    attempts: dict[Task, dict[int, list[Attempt]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        data = read_json(path, "rollouts file")
        if not isinstance(data, dict) or not isinstance(data.get("simulations"), list):
            raise InputError(f'rollouts file {path}: expected an object with "simulations"; check --rollouts')
        for number, raw in enumerate(data["simulations"]):
            where = f"rollouts file {path} simulations[{number}]"
            record = check(RolloutRecord, raw, where)
            if record.outcome == "error" or record.hinted:
                continue
            if record.reward_info is None or record.reward_info.reward is None:
                raise InputError(f"{where}: a scored entry without reward_info.reward; collect it again")
            slot = _slot(record, slots, config, where)
            if slot is None:
                continue
            if record.token_ids is not None and record.action_mask is not None:
                ids, mask = record.token_ids, [bool(bit) for bit in record.action_mask]
            else:
                ids, mask = tokens_of(record.messages, record.tools, codec, where)
            cut = config.max_length
            attempt = Attempt(record.reward_info.reward, tuple(ids[:cut]), tuple(mask[:cut]), where)
            attempts[str(raw.get("game", path)), str(raw.get("task_id"))][slot].append(attempt)
    return attempts


def _slot(record: RolloutRecord, slots: dict[str, int], config: GateConfig, where: str) -> int | None:
    name = "base" if record.adapter is None else adapter_name(record.adapter)
    if name == "base":
        return 0 if config.include_base_slot else None
    if name not in slots:
        raise InputError(
            f"{where}: adapter {name} has no slot; known: {', '.join(slots)}; take the file out of --rollouts"
        )
    return slots[name]


def warm_episodes(
    attempts: dict[Task, dict[int, list[Attempt]]], num_slots: int, tau: float
) -> tuple[list[tuple[Task, LabelledEpisode]], Counter[str]]:
    """One episode per task whose slots differ, with its soft target, and why the other tasks were left out."""
    chosen: list[tuple[Task, LabelledEpisode]] = []
    left_out: Counter[str] = Counter()
    for task in sorted(attempts):
        by_slot = attempts[task]
        means = {slot: sum(a.reward for a in tries) / len(tries) for slot, tries in by_slot.items()}
        if len(means) < 2:
            left_out["measured for one slot only"] += 1
        elif max(means.values()) - min(means.values()) < 1e-9:
            left_out["all slots equal"] += 1
        else:
            best = max(means, key=lambda slot: (means[slot], -slot))
            attempt = max(by_slot[best], key=lambda a: a.reward)
            target = soft_target(means, num_slots, tau)
            episode = LabelledEpisode(attempt.token_ids, attempt.action_mask, best, attempt.source, target=target)
            chosen.append((task, episode))
    return chosen, left_out


def split_by_task(
    chosen: Sequence[tuple[Task, LabelledEpisode]], val_fraction: float, left_out: Counter[str]
) -> GateData:
    """Every k-th task of each label for validation; a task is on one side only.

    Raises:
        InputError: fewer than two informative tasks for every label that occurs.
    """
    train: list[LabelledEpisode] = []
    validation: list[LabelledEpisode] = []
    marked = mark_undecided([episode for _, episode in chosen])
    for slot in sorted({episode.slot for episode in marked}):
        group = [episode for episode in marked if episode.slot == slot]
        held_out = min(max(1, round(val_fraction * len(group))), len(group) - 1)
        validation += group[:held_out]
        train += group[held_out:]
    if not validation or len(train) < 2:
        raise InputError(
            f"{len(chosen)} tasks on which the slots differ (left out: {dict(left_out)}); collect more seeds or samples"
        )
    return GateData(tuple(train), tuple(validation), dict(left_out))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="configs/moe_gate.yaml")
    parser.add_argument("--rollouts", help="glob of rollouts files [the configuration's grpo_data_glob]")
    parser.add_argument("--tau", type=float, default=0.2, help="temperature of the targets, in reward [%(default)s]")
    parser.add_argument("--output-dir", help="instead of the configuration's output_dir")
    parser.add_argument("--resume", action="store_true", help="go on from <output_dir>/state.safetensors")
    args = parser.parse_args(arguments)
    if not args.tau > 0:
        raise InputError(f"--tau {args.tau}: expected a number > 0")
    config = load_gate_config(args.config, {"output_dir": args.output_dir} if args.output_dir else None)
    pattern = args.rollouts or config.grpo_data_glob
    paths = sorted(glob.glob(pattern, recursive=True)) if pattern else []
    if not paths:
        raise InputError(f"rollouts {pattern}: no file; collect rollouts of base and adapters on the same seeds first")
    with held_folder(config.output_dir):
        ranks, _ = join_ranks("cpu")
        try:
            return train_gate(config, paths, args.tau, ranks, args.resume)
        finally:
            ranks.close()


def train_gate(config: GateConfig, paths: Sequence[str], tau: float, ranks: Ranks, resume: bool) -> int:
    """The whole run on this rank; its exit code."""
    begin = time.monotonic()
    torch.manual_seed(config.seed)
    num_slots = len(config.adapter_names) + int(config.include_base_slot)
    attempts = read_attempts(paths, config, ChatCodec.from_model(config.base_model))
    chosen, left_out = warm_episodes(attempts, num_slots, tau)
    data = split_by_task(chosen, config.val_fraction, left_out)
    sys.stderr.write(f"{len(chosen)} informative tasks of {len(attempts)}; left out: {dict(left_out)}\n")
    model = build_model(config)
    score = RouterTrainer(config, data, model, ranks, resume).run()
    if ranks.rank == 0:
        report: dict[str, Any] = report_of(config, data, model, score, time.monotonic() - begin) | {"tau": tau}
        folder = Path(config.output_dir)
        write_json(folder / "config.json", config.model_dump())
        save_gate(model, folder, config.base_model, {key: report[key] for key in ("validation_accuracy", "tau")})
        write_json(folder / "report.json", report)
        print_report(report)
        print(f"{folder / 'gate.safetensors'}: {len(data.train)} training tasks, {report['seconds']:.1f} s")
    return 0


if __name__ == "__main__":
    run_ranks(main)
