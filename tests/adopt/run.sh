#!/usr/bin/env bash
# Runs the tests of NetBox and Healthchecks twice, without this app and with it, and compares what fails. NETBOX and
# HEALTHCHECKS are paths of clones, which stay as they are; only what is set is run. Arguments are labels of tests, for
# `manage.py test`; none = all.
set -euo pipefail
NETBOX=${NETBOX:+$(realpath "$NETBOX")} HEALTHCHECKS=${HEALTHCHECKS:+$(realpath "$HEALTHCHECKS")}
cd "$(dirname "$0")/../.."
home=$PWD work=$PWD/.venv-adopt status=0

prepare() { # name, clone
  local venv=$work/$1
  if [ ! -x "$venv/bin/python" ]; then
    "$(tests/pythons.sh | tail -1 | cut -d' ' -f2-)" -m venv "$venv"
  fi
  # The extra c would need a compiler. Without tblib, the first failure ends a parallel run.
  sed 's/^psycopg\[c/psycopg[binary/' "$2/requirements.txt" >"$venv/requirements.txt"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$venv/requirements.txt" ".[testing]" tblib
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps .
}

manage() { # app or "", name, arguments of manage.py; in the folder of manage.py
  ADOPT_APP=$1 DJANGO_SETTINGS_MODULE=adopt_settings PYTHONPATH=$home/tests/adopt \
    "$work/$2/bin/python" manage.py "${@:3}"
}

run() { # name, labels; in the folder of manage.py
  local name=$1 log=$work/$1 app
  shift
  for app in "" yes; do
    manage "$app" "$name" test --parallel --noinput "$@" >"$log/tests$app.log" 2>&1 || true
    grep -oE '^(FAIL|ERROR): .*' "$log/tests$app.log" | sort -u >"$log/failed$app" || true
    echo "$name, $([ "$app" ] && echo with || echo without) the app: $(grep -E '^Ran ' "$log/tests$app.log"), $(wc -l <"$log/failed$app") fail"
  done
  ran() { sed -n 's/^Ran \([0-9]*\) test.*/\1/p' "$1"; }
  [ -n "$(ran "$log/tests.log")" ] && [ "$(ran "$log/tests.log")" = "$(ran "$log/testsyes.log")" ] || status=1
  diff --unified=0 "$log/failed" "$log/failedyes" || status=1
}

[ -n "$NETBOX$HEALTHCHECKS" ] || { echo "Write make adopt NETBOX=path HEALTHCHECKS=path" >&2; exit 2; }
if [ -n "$HEALTHCHECKS" ]; then
  prepare healthchecks "$HEALTHCHECKS"
  cd "$HEALTHCHECKS"
  ADOPT_PROJECT=hc.settings run healthchecks
fi
if [ -n "$NETBOX" ]; then
  cd "$home"
  prepare netbox "$NETBOX"
  cd "$NETBOX/netbox"
  export ADOPT_PROJECT=netbox.settings NETBOX_CONFIGURATION=adopt_netbox
  # Its migrations take minutes: both test databases are copies of this one.
  psql --quiet "$DATABASE_URL" --command="CREATE DATABASE netbox"
  manage "" netbox migrate --verbosity=0
  run netbox "$@"
fi
exit "$status"
