#!/usr/bin/env bash
# Runs a command with DATABASE_URL pointing at a MariaDB server of its own, and ends the server afterwards.
# The driver is installed beside the server, for this run only: mysqlclient would have to be compiled.
set -euo pipefail

if ! command -v mariadbd >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends mariadb-server >/dev/null
fi
home=$(mktemp -d)
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# The server refuses to run as root: there it runs as the user that Debian's package made.
as=()
if [ "$(id -u)" = 0 ]; then
  chown mysql "$home"
  as=(setpriv --reuid=mysql --regid=mysql --init-groups)
fi
server=
stop() {
  if [ -n "$server" ]; then
    kill "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$home"
}
trap stop EXIT
"${PYTHON:-.venv/bin/python}" -m pip install --quiet --disable-pip-version-check --target "$home/driver" --group mariadb
(
  cd /
  "${as[@]}" mariadb-install-db --no-defaults --datadir="$home/data" --skip-test-db \
    --auth-root-authentication-method=normal >/dev/null 2>&1
)
cd / >/dev/null
"${as[@]}" mariadbd --no-defaults --datadir="$home/data" --bind-address=127.0.0.1 --port="$port" \
  --socket="$home/socket" --pid-file="$home/pid" --character-set-server=utf8mb4 --innodb-flush-log-at-trx-commit=0 >"$home/log" 2>&1 &
server=$!
cd - >/dev/null
deadline=$((SECONDS + 60))
until mariadb --no-defaults --user=root --socket="$home/socket" --execute \
  "CREATE DATABASE ratequota; CREATE USER ratequota; GRANT ALL ON *.* TO ratequota" 2>/dev/null; do
  if [ "$SECONDS" -ge "$deadline" ] || ! kill -0 "$server" 2>/dev/null; then
    cat "$home/log" >&2
    exit 1
  fi
  sleep 0.2
done
PYTHONPATH="$home/driver${PYTHONPATH:+:$PYTHONPATH}" \
  DATABASE_URL="mysql://ratequota@127.0.0.1:$port/ratequota" "$@"
