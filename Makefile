# Works on a fresh clone: every target that needs the environment makes it first, once, and again only when the
# project's own metadata changes.

PYTHON ?= python3
VENV ?= .venv
# Processes of the demo: all GPUs, or two processes on a machine without one.
NUM_PROCESSES ?=
# More arguments for the demo's training script, or for pytest.
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LINTED := ya_fsdp accelerate_plugin benchmarks build_support examples tests

# Without an NVIDIA GPU the constraint keeps pip from fetching torch's accelerator libraries.
HAVE_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
CONSTRAINT := $(if $(filter-out 0,$(HAVE_GPU)),,-c constraints-cpu.txt)

# One thread per process is what several processes on one machine need; a caller can set more. Nothing here asks a hub.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo example-sft bench test lint format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { sub(/:.*/, "", $$1); printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP)  ## make the environment in .venv (the other targets do it by themselves)

$(STAMP): pyproject.toml constraints-cpu.txt $(wildcard build_support/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name it: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINT) -e '.[train,dev]'
	@touch $@

# bf16, as configs/fsdp_config.yaml says, on GPUs; few CPUs compute in it at speed, so fp32 there.
demo: $(STAMP)  ## train a small Llama, sharded, on all GPUs or on two CPU processes; results in runs/demo
	devices=$$($(BIN)/python -c 'import torch; print(torch.cuda.device_count())') && \
	processes=$(or $(NUM_PROCESSES),$$([ "$$devices" -gt 0 ] && echo "$$devices" || echo 2)) && \
	$(BIN)/accelerate launch --config_file configs/fsdp_config.yaml --fsdp_ya_fsdp_enabled true \
		--num_processes "$$processes" $$([ "$$devices" -gt 0 ] || echo --mixed_precision no) \
		examples/train_clm.py $(ARGS)

example-sft: $(STAMP)  ## fine-tune a real chat model with trl's own script; compare with one process; in runs/smollm2
	$(BIN)/python -c 'import gguf' 2>/dev/null || $(BIN)/python -m pip install --quiet $(CONSTRAINT) -e '.[gguf]'
	$(BIN)/python examples/smollm2.py runs/smollm2/model
	$(BIN)/python examples/docstring_pairs.py runs/smollm2/chats --chat
	$(BIN)/python examples/compare_sft.py runs/smollm2/model runs/smollm2/chats runs/smollm2 $(ARGS)

bench: $(STAMP)  ## the CPU benchmarks beside PyTorch FSDP2; results and plots in benchmarks/results (ARGS=--quick)
	$(BIN)/python benchmarks/bench.py $(ARGS)

lint: $(STAMP)  ## ruff, mypy, hadolint and shellcheck
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/shellcheck docker/build.sh .ci/run

# Each test has its own limit (pyproject.toml); the session limit holds for all of them together, in seconds.
test: lint  ## ruff, mypy, then all tests
	$(BIN)/python -m pytest -q --session-timeout=1800 $(ARGS)

format: $(STAMP)  ## let ruff rewrite the code
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
