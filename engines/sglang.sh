#!/usr/bin/env bash
# An environment with the real SGLang 0.5.23 on the CPU, and hsfmt with its plugin: engines/sglang.sh [VENV], 1.6 GB.
# Only models that need no kernels of SGLang's own run there (Llama, Qwen3), with `torch_native` attention.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-sglang}

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
# First and by itself, so that pip takes a small CPU build where one is at hand.
"${install[@]}" torch==2.13.0
# SGLang's own requirements are those of its CUDA stack: the list has what it imports on a CPU.
"${install[@]}" --no-deps -r engines/sglang-requirements.txt
"${install[@]}" --no-deps --no-build-isolation --editable .
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp engines/sglang_cpu_shim/sglang_cpu_shim.py "$site/"
echo 'import sglang_cpu_shim' > "$site/sglang_cpu_shim.pth"
# Beside it, in a folder for PYTHONPATH: the last release before the capture without a draft, which the plugin refuses.
rm -rf "$venv/sglang-0.5.17"
"${install[@]}" --no-deps --target "$venv/sglang-0.5.17" sglang==0.5.17
