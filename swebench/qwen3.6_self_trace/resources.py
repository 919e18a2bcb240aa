"""GPU memory and time of each phase, computed from the shape of the model and the settings of the run.

    python swebench/qwen3.6_self_trace/resources.py --config configs/swebench_qwen36_vllm.yaml
    python swebench/qwen3.6_self_trace/resources.py --config C --model-config MODEL_FOLDER/config.json   # real shape
    python swebench/qwen3.6_self_trace/resources.py --config C --readme swebench/qwen3.6_self_trace/README.md

Memory is arithmetic on tensor shapes (exact but for activations, which assume a checkpoint per layer). Time is an
estimate: work in floating-point operations and bytes over the hardware's limits times the efficiencies of ``plan``.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from phase_settings import Shape
from run_settings import RunSettings, load_settings, server_flag

from pipeline.command_line import Parser
from pipeline.files import InputError, check, read_json, run_cli, write_block
from pipeline.split import parse_shares

GIB = 1024**3
HOURS = 3600.0
BF16, FP32 = 2, 4
ADAM_BYTES = 16  # of one trained number: fp32 weight, gradient and the two moments


class Sizes:
    """Counts of parameters and bytes that follow from a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape = s = shape
        self.full_layers = s.num_hidden_layers // s.full_attention_interval
        self.linear_layers = s.num_hidden_layers - self.full_layers
        self.keys = s.linear_num_key_heads * s.linear_key_head_dim
        self.values = s.linear_num_value_heads * s.linear_value_head_dim

    def linears(self) -> list[tuple[int, int, int]]:
        """(inputs, outputs, how many) of every linear of the decoder layers."""
        s, n, m = self.shape, self.full_layers, self.linear_layers
        h, i, heads = s.hidden_size, s.intermediate_size, s.num_attention_heads * s.head_dim
        queries = heads * (2 if s.attn_output_gate else 1)
        full = [(h, queries, n), (h, s.num_key_value_heads * s.head_dim, 2 * n), (heads, h, n)]
        gates = (h, s.linear_num_value_heads, 2 * m)
        linear = [(h, 2 * self.keys + self.values, m), (h, self.values, m), gates, (self.values, h, m)] if m else []
        return [*full, *linear, (h, i, 2 * s.num_hidden_layers), (i, h, s.num_hidden_layers)]

    @property
    def parameters(self) -> int:
        """All of the language model (a vision tower is not counted)."""
        s = self.shape
        small = (2 * self.keys + self.values) * s.linear_conv_kernel_dim
        small = self.linear_layers * (small + 2 * s.linear_num_value_heads + s.linear_value_head_dim)
        norms = (2 * s.num_hidden_layers + 1) * s.hidden_size + (2 * self.full_layers * s.head_dim if s.qk_norm else 0)
        embeddings = s.vocab_size * s.hidden_size * (1 if s.tie_word_embeddings else 2)
        return embeddings + sum(a * b * n for a, b, n in self.linears()) + small + norms

    def lora_parameters(self, rank: int) -> int:
        """``sum rank * (inputs + outputs)`` over all linears of the decoder layers."""
        return sum(rank * (a + b) * n for a, b, n in self.linears())

    @property
    def kv_bytes(self) -> int:
        """Of one token: a key and a value in every layer of full attention, bf16."""
        return 2 * self.shape.num_key_value_heads * self.shape.head_dim * BF16 * self.full_layers

    @property
    def state_bytes(self) -> int:
        """Of one sequence: the recurrent states of the linear-attention layers, fp32."""
        return self.values * self.shape.linear_key_head_dim * FP32 * self.linear_layers

    def gate_parameters(self, n_adapters: int) -> int:
        """``layers * (hidden + 1) * (N + 1)``: a linear with bias per layer, with a slot for the base."""
        return self.shape.num_hidden_layers * (self.shape.hidden_size + 1) * (n_adapters + 1)


def instance_count(settings: RunSettings) -> int:
    """How many instances the data set is expected to have, 500 when the settings leave it open."""
    named = settings.dataset.instances
    return len(named) if named else settings.dataset.expected_instances or 500


def images_gib(settings: RunSettings) -> float:
    """Container images of all instances: ``instances * plan.instance_disk_gib``."""
    return instance_count(settings) * settings.plan.instance_disk_gib


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. ``memory`` is of one GPU; hours and disk are of the phase."""

    phase: str
    gpus: str
    memory: str
    hours: float
    formula: str
    disk: str


class Estimate:
    """Memory and time of a model with these sizes, under the settings of a run."""

    def __init__(self, settings: RunSettings, shape: Shape) -> None:
        self.settings, self.sizes, self.plan = settings, Sizes(shape), settings.plan
        self.serving = server_flag(settings, "--tensor-parallel-size", 1)
        self.context = server_flag(settings, "--max-model-len", 65_536)
        grpo = settings.training.grpo
        self.trainers = settings.training.processes
        self.rank = int(grpo.get("lora_rank", 32))
        self.episodes = int(grpo.get("max_iters", 40)) * int(grpo.get("groups_per_batch", 8))
        self.episodes *= int(grpo.get("group_size", 16)) * self.plan.capabilities
        self.instances = instance_count(settings)
        self.score_share = 1 - float(parse_shares(settings.mine_score))

    # ------------------------------------------------------------------ memory, bytes

    @property
    def weights(self) -> int:
        return self.sizes.parameters * BF16

    def cache(self) -> float:
        """Keys, values and states of ``plan.batch`` full contexts, on one of the serving GPUs."""
        return self.plan.batch * (self.context * self.sizes.kv_bytes + self.sizes.state_bytes) / self.serving

    def adapters(self) -> int:
        """Weights, gradients and moments of all adapters that train at once."""
        return self.plan.capabilities * self.sizes.lora_parameters(self.rank) * ADAM_BYTES

    def activations(self) -> int:
        """With a checkpoint per layer: one hidden state per layer, one layer's inner tensors, one chunk of logits."""
        s, p = self.sizes.shape, self.plan
        inner = 3 * s.intermediate_size + 8 * s.hidden_size + 4 * s.num_attention_heads * s.head_dim
        per_token = (s.num_hidden_layers * s.hidden_size + inner) * BF16
        return p.pack_tokens * per_token + 3 * p.logit_chunk * s.vocab_size * FP32

    def trainer(self, shards: int) -> float:
        return self.weights / shards + self.adapters() + self.activations()

    def saved_gib(self) -> float:
        """Adapters in bf16, and two checkpoints of each with fp32 weights and moments."""
        numbers = self.plan.capabilities * self.sizes.lora_parameters(self.rank)
        return numbers * (2 * 3 * FP32 + BF16) / GIB

    def export_gib(self) -> float:
        """The routed model's folder: the base's weights (hard links where the base is on the same disk)."""
        return self.weights / GIB

    def training_gib(self) -> float:
        """What phase 5 may write."""
        return self.saved_gib() + self.export_gib()

    # ------------------------------------------------------------------ time, seconds

    def compute(self, flops: float, gpus: int) -> float:
        return flops / (gpus * self.plan.peak_tflops * 1e12 * self.plan.compute_efficiency)

    def decode(self, tokens: float, context: float) -> float:
        """A step reads the weights once and the cache of every sequence: bytes over bandwidth, for ``batch`` tokens."""
        p = self.plan
        read = self.weights + p.batch * (context * self.sizes.kv_bytes + self.sizes.state_bytes)
        return tokens / p.batch * read / (self.serving * p.memory_tb_per_s * 1e12 * p.bandwidth_efficiency)

    def generate(self, prompt_tokens: float, sampled_tokens: float, context: float) -> float:
        """Prefill of tokens that no cache holds (2 P T operations), and decoding."""
        prefill = self.compute(2 * self.sizes.parameters * prompt_tokens, self.serving)
        return prefill + self.decode(sampled_tokens, context)

    def run_agent(self, instances: float) -> float:
        """Phases 1 and 6: the model or the commands, whichever is slower, then the harness."""
        p, s = self.plan, self.settings
        steps = instances * p.steps
        context = p.steps * (p.step_tokens + p.observation_tokens) / 2
        model = self.generate(steps * p.observation_tokens, steps * p.step_tokens, context)
        commands = steps * p.command_s / s.agent.workers
        return max(model, commands) + instances * p.grade_s / s.grading.workers

    def mine(self) -> float:
        p, s = self.plan, self.settings
        answers = s.mining.n_runs * self.instances * float(parse_shares(s.mine_score))
        return self.generate(answers * p.trajectory_tokens, answers * p.answer_tokens, p.trajectory_tokens)

    def synthesize(self) -> float:
        """Every try written once, and solved in two samples."""
        p, s = self.plan, self.settings.synthesis
        tries = p.capabilities * s.max_tries
        sampled = tries * (p.writer_tokens + 2 * s.rollouts * p.solver_tokens)
        return self.generate(tries * (1 + 2 * s.rollouts) * p.solver_tokens, sampled, p.episode_tokens)

    def confirm(self) -> float:
        p, s = self.plan, self.settings
        episodes = p.capabilities * s.synthesis.accept * s.validation.rollouts
        return self.generate(episodes * p.solver_tokens, episodes * p.solver_tokens, p.episode_tokens)

    def train(self) -> float:
        """Sampling, or an update's 6 P T operations (with recomputation): the adapters take turns at both."""
        tokens = self.episodes * self.plan.episode_tokens
        sample = self.generate(tokens / 2, tokens / 2, self.plan.episode_tokens)
        return max(sample, self.compute(6 * self.sizes.parameters * tokens, self.trainers))

    # ------------------------------------------------------------------ table

    def rows(self) -> list[Row]:
        serving = f"{self.serving} serving"
        held = f"{self.weights / self.serving / GIB:.1f} weights + {self.cache() / GIB:.1f} cache"
        whole, sharded = self.trainer(1) / GIB, self.trainer(self.trainers) / GIB
        trainer = f"{held}; trainer {whole:.1f}"
        trainer += f" ({sharded:.1f} with shard_base)" if self.trainers > 1 else ""
        agent = "max(model, steps * command / workers) + grading"
        images = f"{images_gib(self.settings):.0f} GiB of images"
        saved, exported = f"{self.saved_gib():.1f} of checkpoints", f"{self.export_gib():.1f} of export"
        training = f"{self.training_gib():.1f} GiB: {saved}, {exported}"
        return [
            Row("1 baseline", serving, held, self.run_agent(self.instances) / HOURS, agent, images),
            Row("2 mining", serving, held, self.mine() / HOURS, "prefill + decode of N labellings", "< 1 GiB"),
            Row("3 synthesis", serving, held, self.synthesize() / HOURS, "tries * (writer + 2 samples)", "< 1 GiB"),
            Row("4 validation", serving, held, self.confirm() / HOURS, "scenarios * rollouts", "< 1 GiB"),
            Row(
                "5 training", f"{serving} + {self.trainers} training", trainer, self.train() / HOURS,
                "max(sampling, 6 P T / trainers)", training,
            ),
            Row("6 final", serving, held, self.run_agent(self.instances * self.score_share) / HOURS, agent, images),
        ]  # fmt: skip

    def facts(self) -> list[str]:
        z, p = self.sizes, self.plan
        lora = z.lora_parameters(self.rank)
        serve, learn = lora * BF16 / GIB, lora * ADAM_BYTES / GIB
        context = f"{self.context * z.kv_bytes / GIB:.2f} GiB per context of {self.context}"
        return [
            f"{z.parameters / 1e9:.2f} B parameters of the language model, {self.weights / GIB:.1f} GiB in bf16",
            f"keys and values {z.kv_bytes / 1024:.0f} KiB per token, {context}; "
            f"recurrent states {z.state_bytes / 2**20:.0f} MiB per sequence",
            f"one adapter of rank {self.rank} on all linears: {lora / 1e6:.0f} M parameters, {serve:.2f} GiB served, "
            f"{learn:.2f} GiB with gradients and moments",
            f"gates for {p.capabilities} adapters: {z.gate_parameters(p.capabilities):,} parameters",
        ]


def shape_of_model(path: Path) -> Shape:
    """The shape in a model's ``config.json`` (its ``text_config`` where it has one).

    Raises:
        InputError: not such a file.
    """
    data = read_json(path, "model configuration")
    found: dict[str, Any] = data.get("text_config", data) if isinstance(data, dict) else {}
    kept = {key: found[key] for key in Shape.model_fields if key in found}
    layers = found.get("layer_types")
    if isinstance(layers, list) and "full_attention" in layers:
        kept["full_attention_interval"] = max(1, len(layers) // layers.count("full_attention"))
    if "linear_attention" not in (layers or []):  # sizes of layers that the model does not have
        kept = {key: value for key, value in kept.items() if not key.startswith("linear_")}
    kept.setdefault("head_dim", _head_dim(found))
    model_type = str(found.get("model_type", ""))
    kept.setdefault("qk_norm", model_type.startswith("qwen3"))
    kept.setdefault("attn_output_gate", model_type.startswith(("qwen3_5", "qwen3_next")))
    kept.setdefault("num_key_value_heads", found.get("num_attention_heads"))
    return check(Shape, kept, f"model configuration {path}")


def _head_dim(found: dict[str, Any]) -> Any:
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def markdown(estimate: Estimate) -> str:
    """The facts and the table."""
    lines = [f"* {fact}" for fact in estimate.facts()]
    lines += ["", "| phase | GPUs | GiB on one GPU | hours (estimate) | time is | disk |", "|---|---|---|---|---|---|"]
    for row in estimate.rows():
        hours = f"{row.hours:.1f}" if row.hours >= 0.1 else "< 0.1"
        lines.append(f"| {row.phase} | {row.gpus} | {row.memory} | {hours} | {row.formula} | {row.disk} |")
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--config", default="configs/swebench_qwen36_vllm.yaml", help="configuration of the run")
    parser.add_argument("--model-config", type=Path, help="config.json of the model, instead of the section shape")
    parser.add_argument("--readme", type=Path, help="write the table between the marks resources:begin and :end")
    return parser.parse_args(arguments)


def main() -> int:
    args = parse_arguments()
    settings = load_settings(args.config)
    shape = shape_of_model(args.model_config) if args.model_config else settings.shape
    if shape is None:
        raise InputError(f"configuration {args.config}: has no section shape; add the model's sizes or --model-config")
    block = markdown(Estimate(settings, shape))
    if args.readme:
        write_block(args.readme, "resources", block + "\n")
    print(block)
    return 0


if __name__ == "__main__":
    run_cli(main)
