#!/usr/bin/env bash
# An environment with the real SpecForge 0.2.0 trainer on the CPU, and hsfmt: engines/specforge.sh [VENV], 2.2 GB.
# Its losses are Triton kernels: they run there with TRITON_INTERPRET=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-specforge}

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
# First and by itself, so that pip takes a small CPU build where one is at hand. SpecForge names 2.11.
"${install[@]}" torch==2.13.0
# Without SGLang, which SpecForge needs to capture and not to train, and without trackers of experiments.
"${install[@]}" --no-deps -r engines/specforge-requirements.txt
"${install[@]}" --no-deps --no-build-isolation --editable .
