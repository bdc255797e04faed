#!/usr/bin/env bash
# Runs a recipe in fresh clones of what is committed, with the oldest and with the newest supported Python that are
# here: `tests/clones.sh make test` is what newcomers see. Where only one of these Pythons is here, it runs once.
# The last run tries all examples of the property tests, and the tests that are marked `thorough`.
set -euo pipefail
cd "$(dirname "$0")/.."
supported=$(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml | paste --serial --delimiters='|')
pythons=$(tests/pythons.sh | grep -E "^($supported) ") || {
  echo "No supported Python ($supported) with ensurepip is here." >&2
  exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# The checkout may belong to another user, as in containers.
printf '[safe]\n\tdirectory = *\n' >"$work/gitconfig"

newest=$(tail -1 <<<"$pythons" | cut -d' ' -f1)
while read -r version python; do
  [ "$version" != "$newest" ] || export ARGS=--hypothesis-profile=thorough
  echo "== a fresh clone, Python $version: $* ${ARGS:-}"
  GIT_CONFIG_GLOBAL=$work/gitconfig git clone --quiet --local . "$work/$version"
  (cd "$work/$version" && "$@" PYTHON="$python" </dev/null)
done < <(sed -n '1p;$p' <<<"$pythons" | uniq)
