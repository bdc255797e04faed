#!/usr/bin/env bash
# Runs the browser tests on the newest Python that is here, and so on the newest Django; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-browser

# Arguments may leave one of the runs without a test; all others must have some.
pytest() {
  local status=0 settings=$1 paths=$2
  shift 2
  # shellcheck disable=SC2086 # several words
  "$venv/bin/python" -m pytest -n auto --dist worksteal --ds="$settings" $paths "$@" || status=$?
  [ "$status" = 0 ] || { [ "$status" = 5 ] && [ "$#" -gt 0 ]; }
}

if [ ! "$venv/.made" -nt pyproject.toml ]; then
  rm -rf "$venv"
  "$(tests/pythons.sh | tail -1 | cut -d' ' -f2-)" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable . --group browser
  touch "$venv/.made"
fi

echo "== plain admin: $("$venv/bin/python" -c 'import django, sys; print("Python", sys.version.split()[0] + ", Django", django.__version__)')"
pytest tests.browser.settings "tests/browser --ignore=tests/browser/unfold" "$@"

if unfold=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("django-unfold"))' 2>/dev/null); then
  echo "== django-unfold $unfold"
  pytest tests.browser.settings_unfold tests/browser/unfold "$@"
else
  echo "== django-unfold: not run, it needs Python 3.12 or later and the newest here is $("$venv/bin/python" --version)"
fi
