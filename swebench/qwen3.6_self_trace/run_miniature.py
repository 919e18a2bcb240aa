"""All six phases in order on the miniature: eight small repositories, two CPU cores, no image, no GPU.

    python swebench/qwen3.6_self_trace/run_miniature.py                  # or: bash examples/swebench_miniature/run.sh
    python swebench/qwen3.6_self_trace/run_miniature.py --phases 1,6     # some of them
    python swebench/qwen3.6_self_trace/run_miniature.py --real-model     # then phase 1 again: SmolLM2 on a vLLM server

mini-swe-agent, the sandboxes, the official report code, the selection, the scenario checks, GRPO and the gate are real;
a scripted model plays the agent, the labeller and the scenario writer, and the adapters come from SmolLM2. So the rates
of base and adapters are declared with the instances (``plays``): they show that the phases fit together, and nothing
about a model. Phase 6 also evaluates phase 5's export, by vLLM with the routed model's plugin: there SmolLM2 itself is
the agent, and solves nothing. Calling it again resumes. Exit codes: 0 = every phase ended in order, else that of the
phase that did not.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import run_server
from run_folder import RunFolder
from run_settings import ROOT, RunSettings, load_settings
from steps import ending_with_us, shown

from pipeline.command_line import Parser
from pipeline.files import InputError, resolved, run_cli, write_json, write_text
from pipeline.ports import free_port

HERE = Path(__file__).resolve().parent
CONFIG = ROOT / "configs" / "swebench_miniature.yaml"
CAPABILITIES = ("deep_call_graph_traversal", "semantic_logic_precision")
SMOLLM2 = ROOT / "models" / "smollm2"
START_S = 60.0
WHAT_IT_SHOWS = (
    "The phases fit together. The rates of base and adapters are declared (plays), those of the routed model are "
    "SmolLM2's own: none of them says anything about the method."
)
VLLM_MISSING = "phase 6 of the routed model is left out: it needs vllm (without a GPU: .ci/install_vllm_cpu.sh)"
SMALL = {"agent.base_config": "configs/swebench_small_agent.yaml", "agent.model_class": "litellm_textbased"}


def steps(run_dir: Path, config: Path) -> dict[str, list[list[str]]]:
    """The commands of each phase, in order."""
    folder = RunFolder(run_dir)
    where = ["--config", str(config), "--run-dir", str(run_dir)]

    def script(name: str, *flags: str) -> list[str]:
        return [sys.executable, str(HERE / f"{name}.py"), *where, *flags]

    return {
        "1": [script("phase1_baseline_eval")],
        "2": [script("phase2_capability_mining")],
        "3": [script(f"phase3_synth_{name}", "--use-shipped") for name in CAPABILITIES],
        "4": [script("phase4_env_validation")],
        "5": [script("phase5_training")],
        "6": [
            *(script("phase6_final_eval", "--checkpoint", str(folder.adapter(name))) for name in CAPABILITIES),
            *([script("phase6_final_eval", "--checkpoint", str(folder.exported), "--serve")] if has_vllm() else []),
        ],
    }


def has_vllm() -> bool:
    """Whether this Python can serve the routed model."""
    return importlib.util.find_spec("vllm") is not None


@contextlib.contextmanager
def scripted_model(log: Path, name: str) -> Iterator[str]:
    """The scripted model as a process of its own; its URL. It ends with the block, by its process id."""
    port = free_port()
    command = [sys.executable, str(HERE / "run_scripted_model.py"), "--port", str(port), "--model", name]
    if (SMOLLM2 / "tokenizer.json").exists():
        command += ["--tokenizer", str(SMOLLM2)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, start_new_session=True, preexec_fn=ending_with_us()
        )
    url = f"http://127.0.0.1:{port}"
    settings = RunSettings.model_validate({"run_name": "probe", "model": {"name": name, "base_url": url}})
    try:
        deadline = time.monotonic() + START_S
        while not run_server.alive(settings):
            if process.poll() is not None or time.monotonic() > deadline:
                raise InputError(f"the scripted model did not start; see {log}")
            time.sleep(0.1)
        yield url
    finally:
        run_server.stop(process)


def run_step(command: Sequence[str], env: dict[str, str]) -> tuple[int, float]:
    """One command with its dry run before it; exit code and seconds."""
    sys.stdout.write(f"\n$ {shown(command)}\n")
    sys.stdout.flush()
    checked = subprocess.run([*command, "--dry-run"], env=env, cwd=ROOT)
    if checked.returncode != 0:
        return checked.returncode, 0.0
    began = time.monotonic()
    return subprocess.run(command, env=env, cwd=ROOT).returncode, time.monotonic() - began


def run_phases(run_dir: Path, config: Path, phases: Sequence[str], url: str) -> tuple[int, dict[str, float]]:
    """The phases' commands until one fails."""
    env = os.environ | {"VLLM_BASE_URL": url}
    seconds: dict[str, float] = {}
    for phase in phases:
        for command in steps(run_dir, config)[phase]:
            code, took = run_step(command, env)
            seconds[phase] = round(seconds.get(phase, 0.0) + took, 1)
            if code != 0:
                sys.stdout.write(f"phase {phase} ended with {code}\n")
                return code, seconds
    return 0, seconds


def with_real_model(run_dir: Path) -> int:
    """Phase 1 with SmolLM2 on a vLLM server of our own. It solves nothing; the point is that the path is real."""
    if not (SMOLLM2 / "config.json").exists():
        raise InputError(f"{SMOLLM2}: not found; make setup")
    port = free_port()
    settings = load_settings(CONFIG).model_dump(mode="json", exclude_defaults=True)
    settings["model"] |= {"name": str(SMOLLM2), "base_url": f"http://127.0.0.1:{port}"}
    settings["server"]["args"] += f" --port {port}"  # the last one counts
    settings["agent"] |= {name.split(".")[1]: value for name, value in SMALL.items()} | {"step_limit": 5, "workers": 4}
    folder = run_dir.with_name(f"{run_dir.name}_smollm2")
    write_text(folder / "config.yaml", json.dumps(settings, indent=2) + "\n")  # JSON is YAML
    command = [str(HERE / "launch_phase1.sh"), "--config", str(folder / "config.yaml"), "--run-dir", str(folder)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_BASE_URL")} | {"PYTHON": sys.executable}
    sys.stdout.write(f"\n$ {shown(command)}\n")
    sys.stdout.flush()
    return subprocess.run(command, env=env, cwd=ROOT).returncode


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--config", default=str(CONFIG), help="settings of the run")
    parser.add_argument("--run-dir", default=str(ROOT / "runs" / "swebench_miniature"), help="run folder")
    parser.add_argument("--phases", default="1,2,3,4,5,6", help="which phases, comma list")
    parser.add_argument("--real-model", action="store_true", help="afterwards phase 1 with SmolLM2 on a vLLM server")
    args = parser.parse_args()
    run_server.interrupt_on_term()
    run_dir, config = resolved(args.run_dir, "--run-dir"), resolved(args.config, "--config")
    phases = [p.strip() for p in args.phases.split(",") if p.strip()]
    unknown = sorted(set(phases) - set(steps(run_dir, config)))
    if unknown:
        raise InputError(f"--phases {args.phases}: expected numbers from 1 to 6, found {unknown[0]}")
    if "6" in phases and not has_vllm():
        sys.stdout.write(VLLM_MISSING + "\n")
    with scripted_model(run_dir / "scripted_model.log", load_settings(config).model.name) as url:
        code, seconds = run_phases(run_dir, config, phases, url)
    if code == 0 and "6" in phases:
        sys.stdout.write(f"\n{WHAT_IT_SHOWS}\n")
    sys.stdout.write("\nseconds: " + ", ".join(f"phase {p} {s:.0f}" for p, s in seconds.items()) + "\n")
    write_json(run_dir / "seconds.json", {"schema_version": 1, "seconds": seconds})
    if code == 0 and args.real_model:
        code = with_real_model(run_dir)
    return code


if __name__ == "__main__":
    run_cli(main)
