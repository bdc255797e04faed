#!/usr/bin/env bash
# Runs the tests of other projects twice, without this app and with it, and compares what fails. NETBOX, PLANE and so on
# are paths of clones, which stay as they are; only what is set is run. Arguments are labels of tests for those projects
# that have none below; none = all.
set -euo pipefail
cd "$(dirname "$0")/../.."
home=$PWD work=$PWD/.venv-adopt status=0

# The variable, the Python that it wants ("-" = the latest here), the folder of manage.py, its settings, its requirements
# (with commas between), how its tests are run, and which: those of what is throttled.
projects() {
  cat <<'END'
HEALTHCHECKS - . hc.settings requirements.txt test
NETBOX - netbox netbox.settings requirements.txt test
PLANE 3.12 apps/api plane.settings.test requirements/base.txt,requirements/test.txt pytest plane/tests/contract/app/test_authentication.py
COURSE_DISCOVERY 3.12 . course_discovery.settings.test requirements/test.txt pytest course_discovery/apps/core/tests/test_throttles.py course_discovery/apps/taxonomy_support/tests/test_throttles.py
BASEROW 3.11 backend baserow.config.settings.test requirements/base.txt,requirements/dev.txt pytest tests/baserow/core/test_throttling.py tests/baserow/api/test_api_utils.py
END
}

prepare() { # venv, Python, files of requirements
  local venv=$1 python=$2 pip=("$1/bin/python" -m pip install --quiet --disable-pip-version-check) django
  [ -x "$venv/bin/python" ] || "$(tests/pythons.sh | grep "^${python#-}" | tail -1 | cut -d' ' -f2-)" -m venv "$venv"
  # What would need a compiler is left out, and archives are taken from the index. The table has what files include.
  sed -E 's/^psycopg\[c/psycopg[binary/; s/^(\w+) @ .*\/v([0-9.]+)\.zip/\1==\2/; /^(psycopg-c|mysqlclient|uwsgi)==/Id; /^-[rc] /d' \
    "${@:3}" >"$venv/requirements.txt"
  "${pip[@]}" -r "$venv/requirements.txt"
  django=$("$venv/bin/python" -m django --version)
  # Both runs have the same Django. Without tblib, the first failure ends a parallel run.
  [[ $django =~ ^(4|5\.[01])\. ]] && django='5.2.*'
  "${pip[@]}" ".[testing]" tblib "django==$django" "setuptools<81" # has pkg_resources
  "${pip[@]}" --force-reinstall --no-deps .
}

python() { # app or "", venv, arguments; in the folder of manage.py
  ADOPT_APP=$1 DJANGO_SETTINGS_MODULE=adopt_settings PYTHONPATH=$home/tests/adopt:$sources "$2/bin/python" "${@:3}"
}

run() { # venv, "test" or "pytest", labels; in the folder of manage.py
  local venv=$1 app command=(manage.py test --parallel --noinput)
  [ "$2" = test ] || command=(-m pytest -p no:cacheprovider -n 0 --no-cov --create-db --nomigrations --ds=adopt_settings)
  for app in "" yes; do
    python "$app" "$venv" "${command[@]}" "${@:3}" >"$venv/tests$app.log" 2>&1 || true
    grep -oE '^((FAIL|ERROR): .*|(FAILED|ERROR) [^ ]+::[^ ]+)' "$venv/tests$app.log" | sort -u >"$venv/failed$app" || true
    echo "${venv##*/}, $([ "$app" ] && echo with || echo without) the app: $(ran "$app") tests, $(wc -l <"$venv/failed$app") fail"
  done
  # Where no test passes, nothing is compared.
  [ "$(ran "")" = "$(ran yes)" ] && [ "$(ran "")" -gt "$(wc -l <"$venv/failed")" ] || status=1
  diff --unified=0 "$venv/failed" "$venv/failedyes" || status=1
}

ran() { sed -nE 's/^(Ran|.*collected) ([0-9]+) (test|item)s?.*/\2/p' "$venv/tests$1.log"; }

# Baserow finds DATABASE_URL in one place, and reads it in another where it is not.
export ADOPT_DATABASE=${DATABASE_URL:-}
unset DATABASE_URL
sources=src:../premium/backend/src:../enterprise/backend/src # Baserow's
# What Baserow and Plane do not work without.
export SECRET_KEY=adopt POSTGRES_DB=plane WEB_URL=http://localhost:8000 EMAIL_HOST=localhost
found=
while read -r name version folder ADOPT_PROJECT requirements runner labels <&3; do
  [ -n "${!name:-}" ] || continue
  found=1 clone=$(realpath "${!name}") venv=$work/${name,,}
  export ADOPT_PROJECT
  cd "$home"
  files=()
  for file in ${requirements//,/ }; do files+=("$clone/$folder/$file"); done
  [ -e "${files[0]}" ] || files=("$clone/$requirements")
  prepare "$venv" "$version" "${files[@]}"
  cd "$clone/$folder"
  if [ "$name" = NETBOX ]; then
    export NETBOX_CONFIGURATION=adopt_netbox
    # Its migrations take minutes: both test databases are copies of this one.
    psql --quiet "$ADOPT_DATABASE" --command="CREATE DATABASE netbox"
    python "" "$venv" manage.py migrate --verbosity=0
  fi
  # shellcheck disable=SC2086
  run "$venv" "$runner" ${labels:-"$@"}
done 3< <(projects)
[ -n "$found" ] || { echo "Write make adopt NETBOX=path PLANE=path: a variable for each clone" >&2; exit 2; }
exit "$status"
