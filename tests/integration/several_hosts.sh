#!/bin/sh
# several_hosts.sh COUNT COMMAND...: a torchrun COMMAND once per host: host0, host1, ... with a name,
# a shared memory and a network of its own. All are on one Ethernet, where host N is 10.77.0.N+1. As on
# many machines a host's own name leads to loopback there. Needs root.
set -u
count=$1
shift
if [ -z "${ON_SWITCH:-}" ]; then
  # The Ethernet is a network namespace too: nothing of it is seen from outside.
  ON_SWITCH=1 exec unshare --net "$0" "$count" "$@"
fi
unset ON_SWITCH
ip link set lo up && ip link add switch type bridge && ip link set switch up || exit 1
# shellcheck disable=SC2016  # expanded on each host
on_host='
hostname "host$0" && mount -t tmpfs none /dev/shm || exit 1
until ip link show eth0 >/dev/null 2>&1; do sleep 0.05; done
ip link set lo up && ip addr add "10.77.0.$(($0 + 1))/24" dev eth0 && ip link set eth0 up || exit 1
names=/dev/shm/hosts
echo 127.0.0.1 localhost >$names
for other in $(seq 0 "$1"); do
  [ "$other" = "$0" ] && address=127.0.1.1 || address=10.77.0.$((other + 1))
  echo "$address host$other" >>$names
done
mount --bind $names /etc/hosts || exit 1
shift
exec "$@"'
export GLOO_SOCKET_IFNAME=eth0
started=
for host in $(seq 0 $((count - 1))); do
  PET_NODE_RANK=$host unshare --net --uts --mount sh -c "$on_host" "$host" "$((count - 1))" "$@" &
  until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
  ip link add "host$host" type veth peer name eth0 netns $! || exit 1
  ip link set "host$host" master switch up || exit 1
  started="$started $!"
done
status=0
for process in $started; do
  wait "$process" || status=$?
done
exit "$status"
