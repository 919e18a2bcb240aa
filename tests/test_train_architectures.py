"""Every model class that the trainer packs: gradients of the tree pass equal those of the model's own forward, episode
by episode."""

from __future__ import annotations

import copy
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from tiny_models import tiny_model

from pipeline.files import InputError
from train import forward
from train.expert_lora import ExpertsLora
from train.forward import TREE_MODEL_TYPES, action_logprobs, can_pack, make_packs
from train.lora import (
    ALL_LINEARS,
    activate,
    adapter_parameters,
    adapter_state,
    attach_adapter,
    lora_config,
    restore_adapter,
    save_adapter,
)
from train.packing import Pack, TokenSequence, build_pack
from train.tree_decoder import refusal

TREES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def model_of(family: str, **extra: Any) -> Any:
    if family == "qwen2":
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        shape = dict(
            vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.1, tie_word_embeddings=True,
        )  # fmt: skip
        model = Qwen2ForCausalLM(Qwen2Config(**shape | extra)).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero by default: a lost bias would not be seen
                torch.nn.init.normal_(parameter, std=0.3)
        return model
    model = tiny_model(family, **extra)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # one by default: a lost norm weight would not be seen
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("mlp.gate.weight"):  # zero by default: every expert would be as good as another
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def adapted(family: str, targets: tuple[str, ...] = ALL_LINEARS, name: str = "skill", **extra: Any) -> PeftModel:
    """A model with an adapter that is not zero."""
    model = attach_adapter(model_of(family, **extra), name, lora_config(4, 8, targets), seed=1)
    randomise(model, name, seed=2)
    return model


def randomise(model: PeftModel, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(model, name).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def group(n_prompt: int = 37, seed: int = 0) -> list[TokenSequence]:
    """Episodes of two prompts; several begin alike, one is a prefix of another, sampled tokens at the branch points
    too."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(259) for _ in range(n_prompt)] for _ in range(2)]
    prompts[1][:9] = prompts[0][:9]
    episodes = []
    for prompt in prompts:
        for length in (5, 9, 9, 3, 14):
            suffix = [rng.randrange(3) for _ in range(length)]
            episodes.append(
                TokenSequence(prompt + suffix, [False] * n_prompt + [rng.random() < 0.7 for _ in range(length)])
            )
    extended = episodes[-1]
    episodes.append(TokenSequence([*extended.token_ids, 7, 8], [*extended.action_mask, True, True]))
    return episodes


WEIGHTS = torch.randn(400, generator=torch.Generator().manual_seed(9))


def plain_logprobs(model: Any, episodes: list[TokenSequence], temperature: float = 1.0) -> torch.Tensor:
    """The slow twin: the model's own forward, one episode at a time, full logits."""
    parts = []
    for episode in episodes:
        logits = model(input_ids=torch.tensor([list(episode.token_ids)]), use_cache=False).logits[0].float()
        table = torch.log_softmax(logits / temperature, dim=-1)
        parts += [table[i - 1, episode.token_ids[i]] for i, m in enumerate(episode.action_mask) if m]
    return torch.stack(parts)


def packed_logprobs(
    model: Any, episodes: list[TokenSequence], max_tokens: int = 10_000, temperature: float = 1.0, **options: Any
) -> torch.Tensor:
    by_episode: dict[int, torch.Tensor] = {}
    for pack in make_packs(model, episodes, max_tokens):
        values, _ = action_logprobs(model, pack, temperature, chunk=8, **options)
        by_episode |= dict(zip(pack.episodes, values.split([len(p) for p in pack.pair_of_action]), strict=True))
    return torch.cat([by_episode[e] for e in range(len(episodes))])


def gradient(model: PeftModel, values: torch.Tensor, name: str = "skill") -> torch.Tensor:
    model.zero_grad()
    (values * WEIGHTS[: len(values)]).sum().backward()
    return torch.cat([p.grad.flatten() for p in adapter_parameters(model, name).values()])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_the_list_of_packable_types_is_the_list_of_tested_types() -> None:
    assert set(TREES) == TREE_MODEL_TYPES


@pytest.mark.parametrize("family", TREES)
@pytest.mark.parametrize(
    "options", [{}, {"checkpoint": "all"}, {"max_tokens": 60}], ids=["", "checkpoint", "small-packs"]
)
def test_tree_gradients_equal_plain_ones(family: str, options: dict[str, Any]) -> None:
    model, episodes = adapted(family), group()
    assert refusal(forward.base_model(model)) is None
    expected = plain_logprobs(model, episodes)
    found = packed_logprobs(model, episodes, **options)
    assert torch.allclose(found, expected, atol=2e-5)
    assert relative(gradient(model, found), gradient(model, plain_logprobs(model, episodes))) < 1e-5


@pytest.mark.parametrize("family", TREES)
def test_the_models_own_forward_with_a_dense_mask_is_exact_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, episodes = adapted(family), group()
    expected = gradient(model, plain_logprobs(model, episodes))
    monkeypatch.setattr(forward, "structure_refusal", lambda base: "for this test")
    assert relative(gradient(model, packed_logprobs(model, episodes)), expected) < 1e-5


@pytest.mark.parametrize("family", TREES)
def test_a_padded_pack_has_the_same_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a tree gets a length that blocks divide."""
    model, episodes = adapted(family), group()
    expected = gradient(model, plain_logprobs(model, episodes))
    lengths = []

    def laid_out(pack: Pack, device: torch.device) -> Pack:
        lengths.append(pack.padded(128).n_tokens - pack.n_tokens)
        return pack.padded(128)

    monkeypatch.setattr(forward, "_laid_out", laid_out)
    assert relative(gradient(model, packed_logprobs(model, episodes)), expected) < 1e-5
    assert lengths and min(lengths) > 0


@pytest.mark.parametrize("family", TREES)
def test_a_pack_saves_tokens(family: str) -> None:
    model, episodes = adapted(family), group()
    assert sum(p.n_tokens for p in make_packs(model, episodes, 10_000)) < 0.4 * sum(len(e.token_ids) for e in episodes)


@pytest.mark.parametrize(
    "targets",
    list(itertools.chain([ATTENTION, ("v_proj",), ("gate_proj", "down_proj"), ("k_proj", "up_proj")])),
    ids=str,
)
def test_adapters_on_a_part_of_the_linears(targets: tuple[str, ...]) -> None:
    model, episodes = adapted("qwen3", targets), group()
    expected = gradient(model, plain_logprobs(model, episodes))
    assert relative(gradient(model, packed_logprobs(model, episodes)), expected) < 1e-5


def test_attention_only_adapter_on_a_mixture_of_experts() -> None:
    model, episodes = adapted("qwen3_moe", ATTENTION), group()
    assert not any(isinstance(m, ExpertsLora) for m in model.modules())
    expected = gradient(model, plain_logprobs(model, episodes))
    assert relative(gradient(model, packed_logprobs(model, episodes)), expected) < 1e-5


@pytest.mark.parametrize("family", TREES)
def test_temperature_and_reference_pass(family: str) -> None:
    model, episodes = adapted(family), group()
    assert torch.allclose(
        packed_logprobs(model, episodes, temperature=0.7), plain_logprobs(model, episodes, 0.7), atol=3e-5
    )
    with torch.no_grad(), model.disable_adapter():
        found, expected = packed_logprobs(model, episodes), plain_logprobs(model, episodes)
    assert torch.allclose(found, expected, atol=2e-5)
    with torch.no_grad():
        assert (packed_logprobs(model, episodes) - found).abs().max() > 1e-2


def test_bfloat16_stays_within_its_rounding() -> None:
    exact, episodes = adapted("qwen3"), group()
    rounded = attach_adapter(model_of("qwen3").to(torch.bfloat16), "skill", lora_config(4, 8), seed=1)
    for (_, a), (_, b) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        b.data.copy_(a.data)
    assert all(p.dtype == torch.float32 for p in adapter_parameters(rounded, "skill").values())
    expected = gradient(exact, plain_logprobs(exact, episodes))
    own = relative(gradient(rounded, plain_logprobs(rounded, episodes)), expected)
    assert relative(gradient(rounded, packed_logprobs(rounded, episodes)), expected) < 1.5 * own + 1e-3


def test_two_adapters_take_turns() -> None:
    for family in ("llama", "qwen3_moe"):
        model, episodes = adapted(family), group()
        model = attach_adapter(model, "other", lora_config(2, 2), seed=5)
        randomise(model, "other", seed=6)
        for name in ("skill", "other"):
            activate(model, name)
            expected = gradient(model, plain_logprobs(model, episodes), name)
            assert relative(gradient(model, packed_logprobs(model, episodes), name), expected) < 1e-5
            trained = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
            assert trained == set(adapter_parameters(model, name)), family


# ---------------------------------------------------------------------- what is refused


def test_hybrids_get_one_episode_per_row_and_trees_are_refused() -> None:
    model, episodes = adapted("qwen3_5"), group()
    assert not can_pack(model)
    packs = make_packs(model, episodes, 10_000)
    assert [p.episodes for p in packs] == [[e] for e in range(len(episodes))]
    expected = gradient(model, plain_logprobs(model, episodes))
    assert relative(gradient(model, packed_logprobs(model, episodes)), expected) < 1e-5
    with pytest.raises(InputError, match="qwen3_5"):
        action_logprobs(model, build_pack(episodes, range(len(episodes))), 1.0)


def test_packing_a_hybrid_would_have_been_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the refusal above: without it, nothing fails but the numbers."""
    model, episodes = adapted("qwen3_5"), group()
    expected = plain_logprobs(model, episodes)
    monkeypatch.setattr(forward, "can_pack", lambda model: True)
    assert (packed_logprobs(model, episodes) - expected).abs().max() > 1e-2


def test_hybrids_train_their_linear_attention() -> None:
    names = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n in adapter_parameters(adapted("qwen3_5"), "skill")}
    assert names == {*ALL_LINEARS, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}


def test_sliding_windows_are_not_packed() -> None:
    model = model_of("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert "sliding_attention" in model.config.layer_types
    assert not can_pack(model)
    assert refusal(model) == "layers without full attention"


def test_what_the_fast_path_refuses() -> None:
    assert "gelu" in (refusal(model_of("llama", hidden_act="gelu")) or "")
    model = adapted("llama")
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_dropout["skill"] = torch.nn.Dropout(0.1)
    assert "dropout" in (refusal(forward.base_model(model)) or "")
    model = adapted("llama")
    attach_adapter(model, "other", lora_config(2, 2), seed=5)
    model.base_model.set_adapter(["skill", "other"])
    assert "2 active adapters" in (refusal(forward.base_model(model)) or "")
    model = adapted("llama")
    model.merge_adapter()
    assert "merged" in (refusal(forward.base_model(model)) or "")


@pytest.mark.parametrize("reason", ["activation", "adapter"])
def test_a_refused_model_is_computed_by_its_own_forward(reason: str) -> None:
    model, episodes = adapted("llama", **({"hidden_act": "gelu"} if reason == "activation" else {})), group()
    if reason == "adapter":  # only the last layer: the fast path has to start over
        model.base_model.model.model.layers[1].mlp.up_proj.lora_dropout["skill"] = torch.nn.Dropout(0.1).eval()
    expected = gradient(model, plain_logprobs(model, episodes))
    assert relative(gradient(model, packed_logprobs(model, episodes)), expected) < 1e-5


def test_activating_the_active_adapter_changes_nothing_and_a_foreign_switch_is_seen() -> None:
    for family in ("llama", "qwen3_moe"):
        model = adapted(family)
        attach_adapter(model, "other", lora_config(2, 2), seed=5)

        def trained(model: PeftModel = model) -> set[str]:
            return {n for n, p in model.named_parameters() if p.requires_grad}

        assert trained() == set(adapter_parameters(model, "other"))
        activate(model, "other")
        assert trained() == set(adapter_parameters(model, "other"))
        model.base_model.set_adapter("skill")  # behind the peft model's back
        activate(model, "other")
        assert trained() == set(adapter_parameters(model, "other"))
        with model.disable_adapter():
            pass
        activate(model, "skill")
        assert trained() == set(adapter_parameters(model, "skill"))


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("family", [*TREES, "qwen3_5"])
def test_peft_loads_the_adapter_with_equal_logprobs(family: str, tmp_path: Path) -> None:
    episodes = group()
    base = model_of(family)
    model = attach_adapter(copy.deepcopy(base), "skill", lora_config(4, 8), seed=1)
    randomise(model, "skill", seed=2)
    save_adapter(model, "skill", tmp_path / "skill")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "skill")).eval()
    with torch.no_grad():
        found, expected = plain_logprobs(loaded, episodes), packed_logprobs(model, episodes)
        with model.disable_adapter():
            assert (packed_logprobs(model, episodes) - expected).abs().max() > 1e-2
    assert torch.allclose(found, expected, atol=2e-5)


def test_switching_knows_adapters_that_came_and_went() -> None:
    """The layers are remembered, and not for longer than the adapters are the same ones."""
    model = adapted("llama", ("q_proj",))
    attach_adapter(model, "other", lora_config(4, 8, ("q_proj",)), seed=5)
    for name in ("skill", "other"):
        activate(model, name)
    with pytest.raises(ValueError, match="typo"):
        activate(model, "typo")
    model.delete_adapter("other")
    model.add_adapter("other", lora_config(4, 8, ("q_proj", "down_proj")))
    activate(model, "skill")
    activate(model, "other")
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == set(adapter_parameters(model, "other")) and any("down_proj" in n for n in trained)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_state_is_what_peft_says(family: str) -> None:
    """Also beside an adapter whose name begins alike, and with the cast before the copy."""
    model = attach_adapter(adapted(family), "skill_2", lora_config(4, 8), seed=5)
    for name in ("skill", "skill_2"):
        expected = get_peft_model_state_dict(model, adapter_name=name)
        for dtype in (None, torch.bfloat16):
            state = adapter_state(model, name, dtype)
            assert set(state) == set(expected)
            assert all(torch.equal(state[k], v.to(dtype or v.dtype)) for k, v in expected.items())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_state_goes_into_another_adapter_and_damage_is_named(family: str) -> None:
    model, episodes = adapted(family), group()
    with torch.no_grad():
        expected = packed_logprobs(model, episodes)
    state = adapter_state(model, "skill")
    attach_adapter(model, "other", lora_config(4, 8), seed=5)
    restore_adapter(model, "other", state)
    activate(model, "other")
    with torch.no_grad():
        assert torch.equal(packed_logprobs(model, episodes), expected)
    key = sorted(k for k in state if "down_proj" in k)[0]
    with pytest.raises(InputError, match="first difference"):
        restore_adapter(model, "other", {k: v for k, v in state.items() if k != key})
    with pytest.raises(InputError, match="shape"):
        restore_adapter(model, "other", state | {key: state[key][:1]})
