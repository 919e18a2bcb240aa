"""Sampling in this process through transformers: the engine without a server.

Requests that are waiting together run as one batch: the common prefix of all prompts is computed once, each distinct
prompt once, then all rows decode together, those that are equal so far as one, and leave when they finish. Which rows
run together depends on the order of requests only, never on timing, so one machine repeats a run bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from game_registry import AgentError
from pipeline.files import InputError
from train.chat import ChatCodec
from train.engine import Sample, SamplingParams
from train.kv_cache import (
    ATTENTION,
    RowMap,
    SharedPromptLayer,
    can_share_prefix,
    has_only_full_attention,
    new_cache,
)
from train.packed_linear import packed_linears
from train.sampling_lora import cast_adapter

# transformers switches weight tying off for the whole process while it loads a model: of two loads at once, the one
# that ends last can leave it off for good, and every later model with tied embeddings has no head.
LOADING = threading.RLock()
QUIET_TURNS = 16  # of the event loop without a new request, then a batch starts


@dataclasses.dataclass
class _Request:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    adapter: str | None
    future: asyncio.Future[Sample]


@dataclasses.dataclass
class _Row:
    """One sequence being decoded. ``state`` is its decode state in the batch: rows that are equal so far share one."""

    params: SamplingParams
    rng: random.Random
    state: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None


class _Batch:
    """Rows that decode together, and their cache: one decode state per distinct sequence (prompt and tokens so far).

    Rollouts of one prompt often begin alike, and under a trained policy most of them stay alike for long; the model
    runs each distinct sequence once. A state is split where two of its rows sample different tokens.
    """

    def __init__(self, rows: list[_Row], cache: Any, keep: torch.Tensor) -> None:
        """``rows`` point at prompts, which are the first states; ``keep`` [U, P] marks the real prompt keys."""
        self.rows, self.cache = rows, cache
        self.n_states = len(keep)
        self._prompt = torch.arange(len(keep), device=keep.device)  # of each state
        self._keep = None if bool(keep.all()) else keep
        self._shared = isinstance(cache.layers[0], SharedPromptLayer)
        if self._shared:  # else recurrent layers: every state has its own copy; there is no padding
            capacity = max(row.params.max_new_tokens for row in rows)
            for layer in cache.layers:
                layer.branch(self._row_map(), capacity, max(len(rows), len(keep)))

    def _row_map(self) -> RowMap:
        n_prompts = self.cache.layers[0].keys.shape[0]
        return RowMap.build(self._prompt, n_prompts, self._keep)

    def advance(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Forget finished rows and follow the token that each other one has sampled.

        Returns:
            The next token of every state, and for every state the old one that it continues; both [n_states].
        """
        self.rows = [row for row in self.rows if row.finish_reason is None]
        if not self.rows:
            return torch.empty(0, dtype=torch.long, device=device), torch.empty(0, dtype=torch.long, device=device)
        children: dict[tuple[int, int], int] = {}
        tokens: dict[int, int] = {}
        parents: list[int] = []
        for row in self.rows:
            key = (row.state, row.token_ids[-1])
            if key not in children:
                children[key] = row.state if row.state not in tokens else self.n_states + len(parents)
                tokens[children[key]] = key[1]
                if children[key] != row.state:
                    parents.append(row.state)
            row.state = children[key]
        origin = torch.arange(self.n_states + len(parents), device=device)
        if parents:
            origin[self.n_states :] = torch.tensor(parents, device=device)
            self._split(origin)
        alive = sorted(tokens)
        if len(alive) <= 0.75 * self.n_states:
            kept = torch.tensor(alive, dtype=torch.long, device=device)
            self._drop(kept)
            origin = origin[kept]
            position = {state: i for i, state in enumerate(alive)}
            for row in self.rows:
                row.state = position[row.state]
            tokens = {position[state]: token for state, token in tokens.items()}
        return torch.tensor([tokens.get(i, 0) for i in range(self.n_states)], device=device), origin

    def _split(self, origin: torch.Tensor) -> None:
        self._prompt, parents = self._prompt[origin], origin[self.n_states :]
        self.n_states = len(origin)
        if not self._shared:
            self.cache.reorder_cache(origin)
            return
        row_map = self._row_map()
        for layer in self.cache.layers:
            layer.split(row_map, parents)

    def _drop(self, alive: torch.Tensor) -> None:
        """Forget every state but those at ``alive``, and prompts without a state."""
        self.n_states = len(alive)
        if not self._shared:
            self._prompt = self._prompt[alive]
            self.cache.reorder_cache(alive)
            return
        prompts, self._prompt = torch.unique(self._prompt[alive], return_inverse=True)
        n_before = self.cache.layers[0].keys.shape[0]
        self._keep = None if self._keep is None else self._keep[prompts]
        row_map = RowMap.build(self._prompt, len(prompts), self._keep)
        for layer in self.cache.layers:
            layer.drop(row_map, prompts if len(prompts) < n_before else None, alive)


def _draw(weights: torch.Tensor, uniform: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Inverse transform sampling: the first index at which the running sum exceeds ``uniform`` times the total.

    Args:
        weights: [U, vocab], fp32, >= 0, of any scale. The sum runs over blocks, then inside one block.
        uniform: [N] in [0, 1). ``state``: [N], which row of ``weights`` each draw is from.
    """
    n, vocab = weights.shape
    block = 256
    padded = torch.nn.functional.pad(weights, (0, -vocab % block)) if vocab % block else weights
    padded = padded.view(n, -1, block)
    outer = padded.sum(-1).cumsum(-1)[state]  # [N, blocks]
    target = uniform * outer[:, -1]
    which = torch.searchsorted(outer, target[:, None], right=True)[:, 0].clamp_max(outer.shape[1] - 1)
    before = torch.where(which > 0, outer.gather(1, (which - 1).clamp_min(0)[:, None])[:, 0], 0.0)
    inside = padded[state, which]
    inner = inside.cumsum(-1)
    within = torch.searchsorted(inner, (target - before)[:, None], right=True)[:, 0]
    last = (inside > 0).long().mul(torch.arange(1, block + 1, device=which.device)).argmax(-1)
    return which * block + torch.minimum(within, last)  # rounding never picks a token of probability zero


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all prompts begin with: what the smallest and the largest have in common."""
    low, high = min(prompts), max(prompts)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def pick_dtype(device: str) -> torch.dtype:
    """bfloat16 where the hardware multiplies it natively, else float32 (on such a CPU bf16 is the slower one)."""
    if device != "cpu":
        return torch.bfloat16
    try:
        flags = open("/proc/cpuinfo", encoding="utf-8").read()  # noqa: SIM115
    except OSError:
        return torch.float32
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def load_model(folder: str, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """A frozen causal LM in evaluation mode, with this module's attention where the model supports SDPA.

    Threads may load at the same time: they take turns (``LOADING``).

    Raises:
        InputError: the folder cannot be loaded.
    """
    hf_logging.disable_progress_bar()  # the progress lines of the command are the only ones
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    kind = pick_dtype(where) if dtype == "auto" else kinds.get(dtype)
    if kind is None:
        raise InputError(f"--dtype {dtype}: expected auto, bfloat16, float16 or float32")
    try:
        with LOADING:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa")
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"model {folder}: cannot be loaded ({str(error).splitlines()[0]}); check --model") from None
    return frozen(model).to(where)


def frozen(model: Any) -> Any:
    """``model``, in evaluation mode, without gradients and with this module's attention."""
    model.requires_grad_(False)
    model.eval()
    model.set_attn_implementation(ATTENTION)
    return model


class LocalEngine:
    """``Engine`` on a model in this process.

    Args:
        model: a causal LM, a peft or routed model on one: anything with the forward of a transformers causal LM.
        codec: gives the stop tokens and decodes stop strings.
        max_rows: rows decoded together; more requests wait for the next batch.
    """

    def __init__(self, model: Any, codec: ChatCodec, *, max_rows: int = 128) -> None:
        self.model = model
        self.codec = codec
        self.max_rows = max_rows
        self.n_sampled_tokens = 0
        self._adapters: dict[str, str] = {}
        self._waiting: list[_Request] = []
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    def from_folder(cls, folder: str, dtype: str = "auto", device: str = "auto", **options: Any) -> LocalEngine:
        return cls(load_model(folder, dtype, device), ChatCodec.from_model(folder), **options)

    # ------------------------------------------------------------------ Engine

    async def sample(self, prompt_ids: list[int], params: SamplingParams, adapter: str | None = None) -> Sample:
        if adapter is not None and adapter not in self._adapters:
            raise AgentError("server", f"adapter {adapter!r} is not loaded; loaded: {sorted(self._adapters) or 'none'}")
        if not prompt_ids:
            raise AgentError("nonsense", "the prompt has no tokens")
        future: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(tuple(prompt_ids), params, adapter, future))
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        return await future

    async def load_adapter(self, name: str, folder: str) -> None:
        from peft import PeftModel

        peft_name = name.replace(".", "_")
        if name in self._adapters:
            raise InputError(f"adapter {name!r} is already loaded; use a new name for new weights")
        try:
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(folder, adapter_name=peft_name)
            else:
                self.model = PeftModel.from_pretrained(self.model, folder, adapter_name=peft_name)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise InputError(f"adapter {folder}: cannot be loaded ({str(error).splitlines()[0]})") from None
        self.model.requires_grad_(False)
        self.model.eval()
        self._adapters[name] = peft_name

    def bind(self, name: str, peft_name: str) -> None:
        """Sample ``name`` from the live weights of a peft adapter that is already on the model."""
        self._adapters[name] = peft_name

    async def unload_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump

    # ------------------------------------------------------------------ batching

    async def _run(self) -> None:
        while self._waiting:
            await self._all_have_asked()
            adapter = self._waiting[0].adapter
            batch = [r for r in self._waiting if r.adapter == adapter][: self.max_rows]
            chosen = set(map(id, batch))
            self._waiting = [r for r in self._waiting if id(r) not in chosen]
            batch = [r for r in batch if not r.future.cancelled()]
            if not batch:
                continue
            try:
                samples = self.generate([(r.prompt_ids, r.params) for r in batch], adapter)
            except Exception as error:  # foreign model code; whatever it raises, nobody may wait for ever
                for request in batch:
                    if not request.future.done():
                        request.future.set_exception(AgentError("server", f"{type(error).__name__}: {error}"))
                continue
            for request, sample in zip(batch, samples, strict=True):
                if not request.future.done():
                    request.future.set_result(sample)

    async def _all_have_asked(self) -> None:
        """Let every episode that is ready ask before the batch starts.

        Some need a few turns of the event loop more than others, such as those of a group that takes the place of
        another; whether they come in time must not depend on what other adapters do meanwhile.
        """
        seen, quiet = -1, 0
        while quiet < QUIET_TURNS:
            quiet = quiet + 1 if seen == len(self._waiting) else 0
            seen = len(self._waiting)
            await asyncio.sleep(0)

    @contextlib.contextmanager
    def _active(self, adapter: str | None) -> Iterator[None]:
        if adapter is not None:
            self.model.set_adapter(self._adapters[adapter])
            with cast_adapter(self.model, self._adapters[adapter]):
                yield
        elif hasattr(self.model, "disable_adapter") and hasattr(self.model, "peft_config"):
            with self.model.disable_adapter():
                yield
        else:
            yield

    @torch.inference_mode()
    def generate(
        self, rows: Sequence[tuple[Sequence[int], SamplingParams]], adapter: str | None = None
    ) -> list[Sample]:
        """Sample one continuation per (prompt_ids, params), all on one adapter, in one batch."""
        was_training = self.model.training
        self.model.eval()
        try:
            with packed_linears(self.model), self._active(adapter):
                return self._generate(rows)
        finally:
            if was_training:
                self.model.train()

    def _generate(self, rows: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Sample]:
        prompts = list(dict.fromkeys(tuple(p) for p, _ in rows))
        index = {p: i for i, p in enumerate(prompts)}
        groups = self._split(prompts)
        place = {i: (group, k) for group in range(len(groups)) for k, i in enumerate(groups[group])}
        mine: list[list[_Row]] = [[] for _ in groups]
        states = []
        for prompt, params in rows:
            group, k = place[index[tuple(prompt)]]
            states.append(_Row(params, random.Random(params.seed), k))
            mine[group].append(states[-1])
        for members, group_rows in zip(groups, mine, strict=True):
            cache, logits, keep = self._prefill([prompts[i] for i in members])
            lengths = torch.tensor([len(prompts[i]) for i in members], device=logits.device)
            self._decode(_Batch(group_rows, cache, keep), logits, lengths)
        self.n_sampled_tokens += sum(len(s.token_ids) for s in states)
        return [
            Sample(tuple(s.token_ids), tuple(s.logprobs), "stop" if s.finish_reason == "stop" else "length")
            for s in states
        ]

    def _split(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Prompts that may share a batch: all; with a recurrent state (no padding) those of one length."""
        if has_only_full_attention(self._base()):
            return [list(range(len(prompts)))]
        by_length: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(i)
        return list(by_length.values())

    def _base(self) -> Any:
        return (
            self.model.get_base_model()
            if hasattr(self.model, "peft_config") and hasattr(self.model, "get_base_model")
            else self.model
        )

    # ------------------------------------------------------------------ prefill and decode

    def _prefill(self, prompts: list[tuple[int, ...]]) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """Run distinct prompts. Returns the cache, the last logits [U, vocab] and the key mask [U, keys]."""
        device = self._base().device
        shared = _common_prefix(prompts) if len(prompts) > 1 and can_share_prefix(self._base()) else 0
        shared = min(shared, min(map(len, prompts)) - 1)
        cache = new_cache(self._base())
        if shared >= 16:
            self._forward(torch.tensor([prompts[0][:shared]], device=device), None, None, cache)
            cache.reorder_cache(torch.zeros(len(prompts), dtype=torch.long, device=device))
        else:
            shared = 0
        rest = [p[shared:] for p in prompts]
        width = max(map(len, rest))
        ids = torch.tensor([(0,) * (width - len(r)) + tuple(r) for r in rest], device=device)
        pad = torch.tensor([width - len(r) for r in rest], device=device)
        columns = torch.arange(shared + width, device=device)
        keep = (columns < shared)[None] | (columns[None] >= shared + pad[:, None])  # [U, keys]
        if len(prompts) == 1 or not bool(pad.any()):
            logits = self._forward(ids, None, None, cache)
            return cache, logits[:, -1].float(), keep
        steps = torch.arange(width, device=device)
        causal = columns[None, :] <= (shared + steps)[:, None]  # [q, keys]
        mask = keep[:, None, :] & causal[None]
        mask |= (columns[None, :] == (shared + steps)[:, None])[
            None
        ]  # a padding query sees itself, so its softmax is finite
        positions = (shared + steps[None] - pad[:, None]).clamp_min(0)
        logits = self._forward(ids, mask[:, None], positions, cache)
        return cache, logits[:, -1].float(), keep

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, cache: Any
    ) -> torch.Tensor:
        out = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits

    def _decode(self, batch: _Batch, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """Sample until every row is finished. ``logits``: [U, vocab], first token; ``positions``: [U], its position."""
        while True:
            self._choose(batch.rows, logits)
            tokens, origin = batch.advance(logits.device)
            if not batch.rows:
                return
            positions = positions[origin]
            logits = self._forward(tokens[:, None], None, positions[:, None], batch.cache)[:, -1].float()
            positions = positions + 1

    def _choose(self, rows: list[_Row], logits: torch.Tensor) -> None:
        """Append to each row its next token, by inverse transform sampling, and its log-prob; note why it ended.

        Args:
            logits: [U, vocab] of the rows' states.
        """
        device = logits.device
        state = torch.tensor([r.state for r in rows], device=device)
        temperatures = torch.tensor([r.params.temperature for r in rows], device=device)
        greedy = temperatures <= 0
        if not bool((greedy | (temperatures == 1.0)).all()):  # as many distributions as there are rows
            logits = logits[state] / torch.where(greedy, 1.0, temperatures)[:, None]
            state = torch.arange(len(rows), device=device)
        highest, best = logits.max(dim=-1)
        weights = (logits - highest[:, None]).exp_()
        normaliser = highest + weights.sum(-1).log()
        tokens = best[state]
        if not bool(greedy.all()):
            uniform = torch.tensor([r.rng.random() for r in rows], device=device)
            tokens = torch.where(greedy, tokens, _draw(weights, uniform, state))
        chosen = (logits[state, tokens] - normaliser[state]).tolist()
        stops = set(self.codec.stop_token_ids)
        for row, token, logprob in zip(rows, tokens.tolist(), chosen, strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            if token in stops or (row.params.stop and self._hits_stop_string(row)):
                row.finish_reason = "stop"
            elif len(row.token_ids) >= row.params.max_new_tokens:
                row.finish_reason = "length"

    def _hits_stop_string(self, row: _Row) -> bool:
        longest = max(map(len, row.params.stop))
        tail = self.codec.tokenizer.decode(row.token_ids[-(longest + 8) :])
        return any(s in tail for s in row.params.stop)
