#!/bin/sh
# several_hosts.sh COUNT COMMAND...: a torchrun COMMAND once per host, each with a name and a shared
# memory of its own. They share the network, so everybody meets on 127.0.0.1. Needs root.
set -u
count=$1
shift
# shellcheck disable=SC2016  # expanded on each host
on_host='hostname "$0" && mount -t tmpfs none /dev/shm && exec "$@"'
started=
for host in $(seq 0 $((count - 1))); do
  PET_NODE_RANK=$host unshare --uts --mount sh -c "$on_host" "host$host" "$@" &
  started="$started $!"
done
status=0
for process in $started; do
  wait "$process" || status=$?
done
exit "$status"
