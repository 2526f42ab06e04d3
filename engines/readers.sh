#!/usr/bin/env bash
# An environment with the programs whose readers load our exports, on the CPU: engines/readers.sh [VENV], 1.6 GB.
# Their pins exclude each other and ask for engines and GPUs; each gets only what its reader imports.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-readers}

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${install[@]}" torch==2.13.0
"${install[@]}" --no-deps -r engines/readers-requirements.txt
