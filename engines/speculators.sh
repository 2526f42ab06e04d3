#!/usr/bin/env bash
# An environment with the real speculators trainer on the CPU, and hsfmt: engines/speculators.sh [VENV], 1.6 GB.
# Older releases go beside it, in folders for PYTHONPATH: they share everything else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${1:-.venv-speculators}

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
"${install[@]}" torch==2.13.0
"${install[@]}" --no-deps -r engines/speculators-requirements.txt
for release in 0.8.1 0.7.0; do
  rm -rf "$venv/speculators-$release"
  "${install[@]}" --no-deps --target "$venv/speculators-$release" "speculators==$release" "hs-connectors==$release"
done
"${install[@]}" --no-deps --no-build-isolation --editable .
