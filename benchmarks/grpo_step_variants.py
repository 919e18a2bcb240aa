"""The variants that ``bench_grpo_step.py`` runs, each in a process of its own, and the model and group they run on."""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclasses.dataclass(frozen=True)
class Preset:
    """The model's shape and the group: ``group`` episodes of prompt + suffix tokens, one in ``1 / sampled`` suffix
    tokens sampled."""

    config: dict[str, Any]
    dtype: str
    group: int
    prompt: int
    suffix: int
    sampled: float
    rank: int
    repeats: int
    limits_s: dict[str, int]
    brief: bool = False  # TRL timed once


PRESETS = {
    "h200": Preset(
        {
            "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
            "max_position_embeddings": 40960,
        },
        "bfloat16", 16, 4096, 512, 0.25, 32, 5,
        {"tree": 120, "trl": 100, "check": 150, "attention": 60, "small": 90},
    ),
    "cpu": Preset(
        {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
        },
        "float32", 4, 96, 16, 0.25, 4, 2,
        {"tree": 60, "trl": 90, "check": 60, "small": 60},
    ),
}  # fmt: skip


SPREAD = 16  # tokens by which the suffixes of a group differ in length, as they do in training
SMALL = {  # Qwen3-0.6B
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32768,
}  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------- material


def build_model(preset: Preset, device: str, dtype: str | None = None, **changes: Any) -> Any:
    """A Qwen3 model of the preset's shape with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(**(preset.config | changes))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype or preset.dtype))


def group_items(preset: Preset, seed: int = 0, spread: int = 0) -> list[Any]:
    """The group's rollouts as the learner gets them. ``spread``: suffixes are shorter by up to so many tokens."""
    from train.learner import TrainItem
    from train.packing import TokenSequence

    rng = random.Random(seed)
    vocab = preset.config["vocab_size"]
    prompt = [rng.randrange(vocab) for _ in range(preset.prompt)]
    items = []
    for _ in range(preset.group):
        length = preset.suffix - rng.randint(0, min(spread, preset.suffix // 2))
        suffix = [rng.randrange(vocab) for _ in range(length)]
        mask = [False] * preset.prompt + [i % round(1 / preset.sampled) == 0 for i in range(length)]
        sequence = TokenSequence(prompt + suffix, mask)
        items.append(TrainItem(sequence, rng.gauss(0, 1), tuple([-12.0] * sum(mask)), 0))
    return items


def new_learner(model: Any, preset: Preset) -> Any:
    from game_registry import GameMix
    from train.learner import Learner
    from train.lora import attach_adapter, lora_config

    adapted = attach_adapter(model, "bench", lora_config(preset.rank, preset.rank, tuple(TARGETS)), seed=0)
    return Learner(adapted, "bench", GameMix.parse("bench"), lr=1e-5, weight_decay=0.0, seed=0)


def timed(function: Callable[[], Any], repeats: int, device: str) -> list[float]:
    """Wall seconds of each call, the device idle before and after."""
    import torch

    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def peak_gib(device: str) -> float | None:
    import torch

    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None


# ---------------------------------------------------------------------- variants


def run_tree(preset: Preset, device: str) -> dict[str, Any]:
    """``step_s``: the median over updates that each have a new shape, as in training. ``again_s``: the last of them
    once more."""
    import torch

    from train.learner import UpdateConfig
    from train.losses import LossConfig

    learner = new_learner(build_model(preset, device), preset)
    config = UpdateConfig(LossConfig(), 1.0, pack_tokens=16384)
    groups = [group_items(preset, seed, SPREAD) for seed in range(3 + preset.repeats)]

    def update(k: int) -> float:
        return timed(lambda: learner.update(groups[k], config), 1, device)[0]

    first = [update(k) for k in range(3)]
    say(f"first updates {first}")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [update(k) for k in range(3, len(groups))]
    result = {"step_s": statistics.median(times), "times_s": times, "first_s": first, "peak_gib": peak_gib(device)}
    result["again_s"] = update(-1)
    say(str(result))
    result |= limits(learner.model, groups[-1])
    result["phases_ms"] = phases(learner, groups[-1], device)
    say(str(result["phases_ms"]))
    if device == "cuda":
        result["kernels"] = profile(lambda: learner.update(groups[-1], config))
    return result


def phases(learner: Any, items: list[Any], device: str) -> dict[str, float]:
    """Milliseconds of the parts of an update, each with the device idle before and after."""
    from train.forward import action_logprobs, make_packs
    from train.lora import activate

    sequences = [i.sequence for i in items]
    kept: dict[str, Any] = {}

    def forward() -> None:
        kept["values"] = action_logprobs(learner.model, kept["pack"], 1.0)[0]

    def step() -> None:
        learner._reduce_and_clip(1.0)
        learner.optimizer.step()

    parts: dict[str, Callable[[], Any]] = {
        "activate": lambda: activate(learner.model, learner.name),
        "pack": lambda: kept.update(pack=make_packs(learner.model, sequences, 16384)[0]),
        "forward": forward,
        "backward": lambda: kept["values"].sum().backward(),
        "clip_and_step": step,
    }
    found = {}
    for _ in range(2):
        for name, part in parts.items():
            found[name] = round(timed(part, 1, device)[0] * 1e3, 2)
    return found


def limits(model: Any, items: list[Any]) -> dict[str, Any]:
    """Floating-point operations of the update: 4 P T for the linears, 12 heads dim per pair of tokens that meet."""
    import torch

    from train.packing import build_pack

    pack = build_pack([i.sequence for i in items], range(len(items)))
    parameters = sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n)
    config = model.config
    pairs = int((pack.subtree_end - torch.arange(pack.n_tokens)).sum())
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return {
        "packed_tokens": pack.n_tokens,
        "plain_tokens": sum(len(i.sequence.token_ids) for i in items),
        "flops_linear": 4 * parameters * pack.n_tokens,
        "flops_attention": attention,
    }


def profile(function: Callable[[], Any]) -> list[list[Any]]:
    """[kernel, milliseconds, calls] of one call, the longest first."""
    import torch

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as recorded:
        function()
        torch.cuda.synchronize()
    rows = [
        (event.key[:100], round(event.self_device_time_total / 1e3, 3), event.count)
        for event in recorded.key_averages()
        if str(event.device_type).endswith("CUDA")
    ]
    rows.sort(key=lambda row: -row[1])
    say(f"kernels: {sum(r[1] for r in rows):.1f} ms in {sum(r[2] for r in rows)} launches")
    for row in rows[:40]:
        say(f"{row[1]:10.2f} ms {row[2]:6d}  {row[0]}")
    return [list(row) for row in rows[:60]]


def run_small(preset: Preset, device: str) -> dict[str, Any]:
    """Four groups of eight short episodes on a small model: hardly anything to compute, so that the time is that of
    Python and of kernel launches. ``busy_share``: of the step, a kernel ran."""
    from train.learner import UpdateConfig
    from train.losses import LossConfig

    if device == "cuda":
        preset = dataclasses.replace(preset, config=preset.config | SMALL, group=8, prompt=700, suffix=464, sampled=1.0)
    learner = new_learner(build_model(preset, device), preset)
    config = UpdateConfig(LossConfig(), 1.0, pack_tokens=16384)
    batches = [[dataclasses.replace(i, group=g) for g in range(4) for i in group_items(preset, 4 * k + g, SPREAD)]
               for k in range(3 + preset.repeats)]  # fmt: skip

    def update(k: int) -> float:
        return timed(lambda: learner.update(batches[k], config), 1, device)[0]

    result: dict[str, Any] = {"first_s": [update(k) for k in range(3)]}
    times = [update(k) for k in range(3, len(batches))]
    result |= {"step_s": statistics.median(times), "times_s": times, "again_s": update(-1)}
    result["score_s"] = timed(lambda: learner.logprobs_of(batches[-1][0].sequence.token_ids[-512:]), 3, device)
    result["phases_ms"] = phases(learner, batches[-1], device)
    if device == "cuda":
        result["kernels"] = profile(lambda: update(-1))
        result["busy_share"] = sum(row[1] for row in result["kernels"]) / 1e3 / result["step_s"]
    result["python"] = python_profile(lambda: update(-1))
    say(str({k: v for k, v in result.items() if k not in ("kernels", "python")}))
    return result


def python_profile(function: Callable[[], Any]) -> list[list[Any]]:
    """[function, milliseconds in itself, milliseconds with what it calls, calls] of one call, the longest first."""
    recorded = cProfile.Profile()
    recorded.runcall(function)
    rows = [
        [f"{Path(file).name}:{line} {name}", round(own * 1e3, 2), round(total * 1e3, 2), calls]
        for (file, line, name), (_, calls, own, total, _) in pstats.Stats(recorded).stats.items()  # type: ignore[attr-defined]
    ]
    rows.sort(key=lambda row: -row[1])
    for row in rows[:25]:
        say(f"{row[1]:8.2f} {row[2]:8.2f} ms {row[3]:6d}  {row[0]}")
    return rows[:40]


def run_trl(preset: Preset, device: str) -> dict[str, Any]:
    """TRL's own loss on the same group: prompt and completion per episode, its masks, its log-prob kernel."""
    import torch

    trainer = trl_trainer(preset, device)
    model = trainer.model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    items = group_items(preset)
    result: dict[str, Any] = {"by_batch": {}}
    for batch in (1, 4):
        inputs = [trl_inputs(preset, items[i : i + batch], device) for i in range(0, len(items), batch)]
        trainer.current_gradient_accumulation_steps = len(inputs)

        def step(inputs: list[dict[str, Any]] = inputs) -> None:
            for part in inputs:
                trainer.accelerator.backward(trainer.compute_loss(model, part))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        step(inputs[:1])
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = timed(step, 1 if preset.brief else 2, device)
        result["by_batch"][batch] = {"step_s": min(times), "peak_gib": peak_gib(device)}
        say(f"trl, micro-batch {batch}: {result['by_batch'][batch]}")
    result["step_s"] = min(entry["step_s"] for entry in result["by_batch"].values())
    return result


def trl_trainer(preset: Preset, device: str) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {"<pad>": 0, "<eos>": 1, "a": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), pad_token="<pad>", eos_token="<eos>"
    )
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=1, gradient_accumulation_steps=preset.group,
        num_generations=preset.group, max_completion_length=preset.suffix, bf16=preset.dtype == "bfloat16",
        use_cpu=device == "cpu", report_to=[], loss_type="grpo",
    )  # fmt: skip
    return GRPOTrainer(
        model=build_model(preset, device),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * preset.group),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=preset.rank, lora_alpha=preset.rank, target_modules=TARGETS, task_type="CAUSAL_LM", lora_dropout=0.0
        ),
    )


def trl_inputs(preset: Preset, items: list[Any], device: str) -> dict[str, Any]:
    import torch

    ids = torch.tensor([i.sequence.token_ids for i in items], device=device)
    mask = torch.tensor([i.sequence.action_mask for i in items], device=device).long()
    cut = preset.prompt
    return {
        "prompt_ids": ids[:, :cut], "prompt_mask": torch.ones_like(ids[:, :cut]),
        "completion_ids": ids[:, cut:], "completion_mask": torch.ones_like(ids[:, cut:]), "tool_mask": mask[:, cut:],
        "advantages": torch.tensor([i.advantage for i in items], device=device),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip


def run_check(preset: Preset, device: str) -> dict[str, Any]:
    """Relative error of the tree's gradient against one plain pass per episode, fp32, and both in bf16 against fp32."""
    import torch

    small = dataclasses.replace(preset, prompt=min(600, preset.prompt), suffix=min(100, preset.suffix), group=4)
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
    changes = {"num_hidden_layers": 2, "vocab_size": min(4096, preset.config["vocab_size"])}
    small = dataclasses.replace(small, config=preset.config | changes)
    grads: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        learner = new_learner(build_model(small, device, dtype), small)
        generator = torch.Generator(device="cpu").manual_seed(3)
        for parameter in learner.parameters.values():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        items = group_items(small, 5, 20)
        for name, loss in (("tree", tree_loss), ("plain", plain_loss)):
            learner.model.zero_grad()
            loss(learner.model, items).backward()
            grads[f"{name}_{dtype}"] = torch.cat([p.grad.double().flatten() for p in learner.parameters.values()])
    exact = grads["plain_float32"]
    errors = {name: float((g - exact).norm() / exact.norm()) for name, g in grads.items() if g is not exact}
    say(str(errors))
    return {"relative_error_to_plain_float32": errors}


def tree_loss(model: Any, items: list[Any]) -> Any:
    import torch

    from train.forward import action_logprobs, make_packs

    total = torch.zeros((), device=model.device)
    for pack in make_packs(model, [i.sequence for i in items], 16384):
        logprobs, _ = action_logprobs(model, pack, 1.0)
        weights = [items[e].advantage for e, p in zip(pack.episodes, pack.pair_of_action, strict=True) for _ in p]
        total = total + (logprobs * torch.tensor(weights, device=model.device)).sum()
    return total


def plain_loss(model: Any, items: list[Any]) -> Any:
    import torch

    total = torch.zeros((), device=model.device)
    for item in items:
        ids = torch.tensor([item.sequence.token_ids], device=model.device)
        rows = torch.tensor([i for i, m in enumerate(item.sequence.action_mask) if m], device=model.device)
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, rows - 1].float(), -1)
        total = total + item.advantage * logprobs.gather(1, ids[0, rows, None]).sum()
    return total


def run_attention(preset: Preset, device: str) -> dict[str, Any]:
    """Milliseconds of one layer's attention: the tree by FlexAttention, its large rectangle (suffixes x prompt) and its
    prompt by other kernels. ``first_ms``: both passes when the shape is met for the first time."""
    import torch

    from train.packing import build_pack
    from train.tree_attention import tree_attention, tree_mask

    items = group_items(preset)
    pack = build_pack([i.sequence for i in items], range(len(items)))
    c = preset.config
    n, dim = pack.n_tokens, c["head_dim"]
    q, k, v = (
        torch.randn(n, h, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for h in (c["num_attention_heads"], c["num_key_value_heads"], c["num_key_value_heads"])
    )
    grad = torch.randn_like(q)
    start = time.perf_counter()
    mask = tree_mask(pack.subtree_end, torch.device(device), 4)
    result: dict[str, Any] = {"mask_ms": (time.perf_counter() - start) * 1e3}
    result["flex"] = both_passes(lambda: tree_attention(q, k, v, mask, dim**-0.5), grad)
    say(f"flex: {result['flex']}")
    cut = preset.prompt
    heads = lambda x, a, b: x[a:b].transpose(0, 1)[None]  # noqa: E731
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):

        def rectangle(backend: Any = backend, causal: bool = False, rows: tuple[int, int] = (cut, n)) -> Any:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    heads(q, *rows), heads(k, 0, cut), heads(v, 0, cut), is_causal=causal, enable_gqa=True  # type: ignore[no-untyped-call]
                )
            return out[0].transpose(0, 1)

        for kind, function, upstream in (
            ("rectangle", rectangle, grad[cut:]),
            ("prompt", lambda f=rectangle: f(causal=True, rows=(0, cut)), grad[:cut]),
        ):
            try:
                result[f"{name}_{kind}"] = both_passes(function, upstream)
            except RuntimeError as error:  # a backend that this build does not have
                result[f"{name}_{kind}"] = str(error).splitlines()[0]
            say(f"{name} {kind}: {result[f'{name}_{kind}']}")
    return result


def both_passes(function: Callable[[], Any], grad: Any) -> dict[str, float]:
    """Milliseconds of the first call (both passes), median ones of forward and of backward."""
    first = timed(lambda: function().backward(grad), 2, "cuda")[0]
    forward = timed(function, 7, "cuda")
    total = timed(lambda: function().backward(grad), 7, "cuda")
    median = statistics.median(forward)
    backward = statistics.median(total) - median
    return {"first_ms": first * 1e3, "forward_ms": median * 1e3, "backward_ms": backward * 1e3}


VARIANTS = {
    "tree": run_tree,
    "check": run_check,
    "attention": run_attention,
    "trl": run_trl,
    "small": run_small,
}
