"""A routed tiny model from nothing, in seconds: build, compare with base and peft, one backward, save, export, load.

python -m moe_gate.smoke_test
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moe_gate import (
    RoutingRecorder,
    assert_frozen,
    build_capability_model,
    force_route,
    gater_parameters,
    load_routed,
    save_gate,
)
from pipeline.files import run_cli

ADAPTERS = {"alpha": {"r": 4, "lora_alpha": 8}, "beta": {"r": 6, "lora_alpha": 9, "use_rslora": True}}
TOLERANCE = 2e-6


def tiny_model() -> Any:
    """A Llama of three layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def checks(folder: Path) -> Iterator[tuple[str, bool]]:
    """(what is checked, whether it holds), one after the other."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model()
    base.save_pretrained(folder / "base")
    references = {}
    for name, settings in ADAPTERS.items():
        lora = LoraConfig(target_modules="all-linear", init_lora_weights=False, **settings)
        references[name] = get_peft_model(copy.deepcopy(base), lora).eval()
        references[name].save_pretrained(folder / name)
    model = build_capability_model(str(folder / "base"), {name: str(folder / name) for name in ADAPTERS}).eval()
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        yield "an untrained gate is the base, bit for bit", torch.equal(model(ids).logits, base(ids).logits)
        for name, reference in references.items():
            with force_route(model, name):
                gap = float((model(ids).logits - reference(ids).logits).abs().max())
            yield f"slot {name} is its peft adapter (largest difference {gap:.1e})", gap < TOLERANCE
    assert_frozen(model)
    yield f"only the gates can be trained ({sum(p.numel() for p in gater_parameters(model))} parameters)", True
    with torch.no_grad():
        for parameter in gater_parameters(model):
            torch.nn.init.normal_(parameter) if parameter.ndim == 2 else parameter.zero_()
        with RoutingRecorder(model) as recorder:
            whole = model(ids).logits
        cached, cache = [], None
        for step in torch.split(ids, 3, dim=1):
            output = model(step, past_key_values=cache, use_cache=True)
            cached.append(output.logits)
            cache = output.past_key_values
        gap = float((torch.cat(cached, 1) - whole).abs().max())
    shares = ", ".join(f"{name} {share:.2f}" for name, share in recorder.statistics().share_of_slot.items())
    yield f"with a cache as without ({shares}; largest difference {gap:.1e})", gap < 10 * TOLERANCE
    model.train()
    model(ids, labels=ids).loss.backward()
    yield "every gate gets a gradient", all(p.grad is not None and bool(p.grad.any()) for p in gater_parameters(model))
    model.eval()
    save_gate(model, folder / "gate", str(folder / "base"))
    with torch.no_grad():
        yield "saved and loaded, bit for bit", torch.equal(load_routed(folder / "gate")(ids).logits, whole)
        from moe_gate.export import export
        from moe_gate.exported import load_exported

        export(str(folder / "gate"), folder / "out")
        yield "exported and loaded, bit for bit", torch.equal(load_exported(folder / "out")(ids).logits, whole)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    begin, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="trace_smoke_") as folder:
        for what, holds in checks(Path(folder)):
            failed += not holds
            print(f"{'ok  ' if holds else 'FAIL'} {what}")
    print(f"{'all checks passed' if not failed else f'{failed} checks failed'} in {time.monotonic() - begin:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(main)
