#!/usr/bin/env bash
# Runs a command with DATABASE_URL pointing at a PostgreSQL server of its own, and ends the server afterwards.
set -euo pipefail

if ! compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq postgresql >/dev/null
fi
bin=$(dirname "$(compgen -G '/usr/lib/postgresql/*/bin/initdb' | sort -V | tail -1)")
home=$(mktemp -d)
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# The server refuses to run as root: there it runs as the user that Debian's package made.
as=()
if [ "$(id -u)" = 0 ]; then
  chown postgres "$home"
  as=(setpriv --reuid=postgres --regid=postgres --init-groups)
fi
stop() {
  (cd / && "${as[@]}" "$bin/pg_ctl" -D "$home/data" -m immediate stop >/dev/null 2>&1) || true
  rm -rf "$home"
}
trap stop EXIT
(
  cd /
  "${as[@]}" "$bin/initdb" -D "$home/data" -U ratequota --auth=trust >/dev/null
  "${as[@]}" "$bin/pg_ctl" -D "$home/data" -w -l "$home/log" \
    -o "-p $port -c listen_addresses=127.0.0.1 -c unix_socket_directories='$home' -c fsync=off" start >/dev/null
)
DATABASE_URL="postgres://ratequota@127.0.0.1:$port/postgres" "$@"
