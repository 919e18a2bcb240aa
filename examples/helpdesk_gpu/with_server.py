"""Start a vLLM server, run a command in which SERVER_URL stands for its address, and end the server.

    python examples/helpdesk_gpu/with_server.py --model runs/routed -- python -m train.evaluate ... SERVER_URL

vLLM finds the plugin for routed models where this project is installed; where it only lies on the path, an entry point
is written for the time of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from scheduler import die_with_parent

from pipeline.files import ServerError, run_cli
from pipeline.ports import free_port

START_S = 300.0
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "moe_gate.vllm_plugin:register"
FLAGS = "--dtype bfloat16 --max-model-len 2048 --gpu-memory-utilization 0.2 --enable-prefix-caching"


def plugin_path(folder: Path) -> list[str]:
    """Places to add to the server's PYTHONPATH so that it finds the plugin; none where it finds it anyway."""
    if any(found.value == PLUGIN for found in entry_points(group=PLUGIN_GROUP)):
        return []
    written = folder / "trace_plugin-0.dist-info"
    written.mkdir(parents=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: trace-plugin\nVersion: 0\n", encoding="utf-8")
    (written / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\ntrace_moe_gate = {PLUGIN}\n", encoding="utf-8")
    return [str(folder), str(Path(__file__).resolve().parents[2])]


@contextlib.contextmanager
def server(model: str, flags: list[str]) -> Iterator[str]:
    """The address of a server that lives as long as the block.

    Raises:
        ServerError: it did not come up; the last lines of its log are in the message.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ, "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.NamedTemporaryFile(prefix="vllm_", suffix=".log") as log, tempfile.TemporaryDirectory() as folder:
        places = [*plugin_path(Path(folder)), *filter(None, [os.environ.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(places)} if places else {}
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags], env=env, stdout=log, stderr=log,
            preexec_fn=die_with_parent,  # in this session: who stops or reaps the stage reaches all of it
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_up(process, url, Path(log.name))
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            process.wait()


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path, limit_s: float = START_S) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
            return
        time.sleep(0.5)
    tail = log.read_text(errors="replace")[-600:].replace("\n", " | ")
    state = f"exited with {process.returncode}" if process.poll() is not None else f"not up within {limit_s:g} s"
    raise ServerError(f"the vLLM server {state}: {tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder to serve")
    parser.add_argument("--flags", default=FLAGS, help="of the server [%(default)s]")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    with server(args.model, args.flags.split()) as url:
        return subprocess.run([url if part == "SERVER_URL" else part for part in command], check=False).returncode


if __name__ == "__main__":
    run_cli(main)
