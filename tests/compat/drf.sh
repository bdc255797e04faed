#!/usr/bin/env bash
# Runs the throttling tests of the DRF that is installed, from its source distribution, against compat.drf.
# PYTHON is the interpreter of an environment with the group "test".
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
version=$("$python" -c 'from importlib.metadata import version; print(version("djangorestframework"))')
kept=.venv/drf-$version

if [ ! -f "$kept/test_throttling.py" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "$python" -m pip --quiet --disable-pip-version-check download --no-deps --no-binary djangorestframework \
    --dest "$work" "djangorestframework==$version"
  mkdir -p "$kept"
  tar --extract --gzip --file "$work"/*.tar.gz --strip-components 2 --directory "$work" --wildcards '*/tests/test_throttling.py'
  mv "$work/test_throttling.py" "$kept/"
fi
# The tests empty their Redis: it is one of their own.
env -u RATEQUOTA_TEST_REDIS_URL "$python" -m pytest --config-file pyproject.toml --rootdir . \
  --ds tests.compat.settings -p tests.compat.drf_plugin "$kept/test_throttling.py" "$@"
