#!/usr/bin/env bash
# Lists the Pythons from 3.11 on that are here, oldest first: a version and a path on each line.
set -euo pipefail

# A name on PATH may be pyenv's for a version that is not chosen here, and Debian may lack ensurepip: each is asked.
for python in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python $(compgen -c python3 | grep -xE 'python3(\.[0-9]+)?'); do
  "$python" -c '
import ensurepip, sys
assert sys.version_info >= (3, 11)
print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null || true
done | sort --key=1,1V --unique
