#!/usr/bin/env bash
# Runs the legs of tox.ini, two at a time, and tells what each of them was; ENV names some of them, with commas between.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv-matrix/bin
# A name on PATH may be pyenv's for a version that is not chosen here: the real ones stand before it.
while read -r _ python; do
  PATH=$(dirname "$python"):$PATH
done < <(tests/pythons.sh)
RATEQUOTA_MATRIX=$(mktemp)
trap 'rm -f "$RATEQUOTA_MATRIX"' EXIT
export PATH RATEQUOTA_MATRIX
legs=${ENV:-$("$bin/tox" list --quiet --no-desc | paste --serial --delimiters ,)}

status=0
"$bin/tox" run-parallel --parallel 2 --parallel-no-spinner --quiet -e "$legs" -- "$@" || status=$?

# A leg that wrote nothing came to no test: its Python is not here, or its packages could not be had.
for leg in ${legs//,/ }; do
  grep -q ": $leg: " "$RATEQUOTA_MATRIX" && continue
  python=python3.${leg:3:2}
  if "$python" --version >/dev/null 2>&1; then
    echo "failed: $leg: its environment could not be made" >>"$RATEQUOTA_MATRIX"
  else
    echo "not run: $leg: no $python is here" >>"$RATEQUOTA_MATRIX"
  fi
done
echo "== the legs"
sort --reverse "$RATEQUOTA_MATRIX"
count() { grep -c "^$1: " "$RATEQUOTA_MATRIX" || true; }
echo "$(count passed) legs passed, $(count failed) failed, $(count 'not run') not run"
[ "$(count failed)" = 0 ] && { [ "$status" = 0 ] || [ "$(count passed)" = 0 ]; } # tox wants one leg at least
