#!/usr/bin/env bash
# Heads on one GPU, unattended, in under ten minutes: trained for five on the embedded target, then what they are worth
# there, and how much of the loop's time is computing, with a random target of the shape of an 8B model:
#
#   tests/gpu_heads.sh                     prints each part and writes runs/gpu/report.json; exit status 0 when all ran
#   tests/gpu_heads.sh --out runs/other    elsewhere; nothing is written over
#   tests/gpu_heads.sh train worth         some parts alone (loop: the one with the large target)
#   tests/gpu_heads.sh --dry-run           on the CPU at tiny sizes, to try the script itself
#
# PYTHON names the interpreter (.venv/bin/python by default). Nothing is downloaded.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-.venv/bin/python}
if ! [ -x "$(command -v "$PYTHON")" ]; then
    echo "FAIL: no interpreter at $PYTHON: set PYTHON" >&2
    exit 2
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec timeout --kill-after=10 590 "$PYTHON" -m tests.gpu_heads "$@"
