"""An importable ``torchvision`` without images, for vLLM's Qwen3.5 on a CPU.

vLLM's module of the text model imports its vision siblings, and those transformers' image processors, which import
torchvision. Its wheels on PyPI need CUDA's PyTorch, so next to a CPU build it cannot be imported. A text model calls
nothing of it: these names are only imported.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.28.0"
FILES = {
    f"torchvision-{VERSION}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: torchvision\nVersion: {VERSION}\n",
    "torchvision/__init__.py": f'__version__ = "{VERSION}"\n',
    "torchvision/io.py": (
        'import enum\n\nImageReadMode = enum.Enum("ImageReadMode", ["RGB"])\n\n\n'
        'def decode_image(*_, **__):\n    raise NotImplementedError("no images here")\n'
    ),
    "torchvision/transforms/__init__.py": (
        "import enum\n\n"
        'names = ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"]\n'
        'InterpolationMode = enum.Enum("InterpolationMode", {name: name.lower() for name in names})\n'
    ),
    "torchvision/transforms/functional.py": (
        'def pil_to_tensor(image):\n    raise NotImplementedError("no images here")\n'
    ),
    "torchvision/transforms/v2/__init__.py": "",
    "torchvision/transforms/v2/functional.py": "",
}


def write(folder: Path) -> Path:
    """Write the package into ``folder``, for ``PYTHONPATH``."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder
