#!/usr/bin/env bash
# What only a GPU can show, on one GPU, unattended, in under six minutes:
#
#   tests/gpu_check.sh               each part prints pass or FAIL; the exit status is 0 when all passed
#   tests/gpu_check.sh zero fsdp2    some parts alone
#   tests/gpu_check.sh --dry-run     on the CPU, as far as a CPU goes, to try the script itself
#   tests/gpu_check.sh --commands    only print each command it would run, and check that it can be one
#
# PYTHON names the interpreter (.venv/bin/python by default). It needs the extras deepspeed and liger, and the packages
# of the tests; nothing is downloaded.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
if ! [ -x "$(command -v "$PYTHON")" ]; then
    echo "FAIL: no interpreter at $PYTHON: set PYTHON" >&2
    exit 2
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec timeout --kill-after=10 350 "$PYTHON" tests/gpu_check.py "$@"
