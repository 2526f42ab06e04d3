#!/usr/bin/env bash
# An environment with vLLM's CPU build, its hidden-states connector, and hsfmt: engines/vllm.sh [VENV], 3.5 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-vllm}

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${install[@]}" torch==2.13.0
# Without torchvision, torchaudio and torchcodec, which serving text does not need.
"${install[@]}" --no-deps -r engines/vllm-requirements.txt
shim=$(mktemp -d)
trap 'rm -rf "$shim"' EXIT
cp engines/vllm_cpu_shim/* "$shim"  # setuptools writes into the folder that it builds
"${install[@]}" --no-deps --no-build-isolation "$shim"
"${install[@]}" --no-deps --no-build-isolation --editable .
