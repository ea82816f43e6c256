# The lab's first process. Run by busybox's sh, with the host's files as the root directory, read only.
#
# "settings", beside this file, sets: run (this directory), busybox, layer (the directory of the unpacked packages),
# mode (run or shell), driver, nodes, port_rate_mbit (or nothing), mhz, and the positional parameters, which are the directories to be writable.
# Applets are part of busybox: nothing of the host is run before the command itself, save from the layer.
. "${0%/*}/settings"

fail() {
  echo "lab: $*" >/dev/kmsg
  "$busybox" poweroff -f
}

# Until the guest's own /proc is there, /proc/self/exe, by which busybox finds its applets, is the host's.
"$busybox" mount -t proc proc /proc || fail "cannot mount /proc"
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev || fail "cannot mount /dev"
mkdir /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
ln -s /proc/self/fd /dev/fd
ln -s fd/0 /dev/stdin
ln -s fd/1 /dev/stdout
ln -s fd/2 /dev/stderr

# perftest converts cycles to time by a line that user-mode Linux does not print.
mount -t tmpfs lab /mnt
sed "s/^model name/cpu MHz\t\t: $mhz\n&/" /proc/cpuinfo >/mnt/cpuinfo
mount -o bind /mnt/cpuinfo /proc/cpuinfo

# The root directory of the command: the host's files, the packages over them, a layer in memory on top. The packages
# are mounted on their own because the same file system must not be found in two layers of an overlay.
mkdir /mnt/layer /mnt/upper /mnt/work /mnt/root /mnt/run
mount -t hostfs -o "ro,$layer" none /mnt/layer || fail "cannot mount $layer"
mount -t hostfs -o "rw,$run" none /mnt/run || fail "cannot mount $run"
mount -t overlay -o lowerdir=/mnt/layer:/,upperdir=/mnt/upper,workdir=/mnt/work root /mnt/root ||
  fail "cannot mount the overlay"
for dir in proc sys dev; do mount -o rbind "/$dir" "/mnt/root/$dir"; done
mount -t tmpfs run /mnt/root/run
for dir; do
  mkdir -p "/mnt/root$dir"
  mount -t hostfs -o "rw,$dir" none "/mnt/root$dir" || fail "cannot mount $dir"
done
cp /mnt/run/command /mnt/root/run/lab-command

# The nodes. Packets from one local address to another take the wire if local addresses are accepted as sources
# (accept_local, rp_filter) and every interface answers for, and announces, its own address alone (arp_*).
for scope in all default; do
  for setting in accept_local=1 rp_filter=0 arp_ignore=1 arp_announce=2; do
    echo "${setting#*=}" >"/proc/sys/net/ipv4/conf/$scope/${setting%=*}"
  done
done
tool() {
  # By env, or busybox would take its own ip.
  PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot /mnt/root /usr/bin/env "$@" || fail "$* failed"
}
{
  echo "link set lo up"
  echo "link add br0 mtu 9000 type bridge"
  echo "link set br0 up"
  for i in $(seq "$nodes"); do
    echo "link add veth$i mtu 9000 type veth peer name port$i mtu 9000"
    echo "link set port$i master br0 up"
    echo "addr add 10.77.0.$i/24 dev veth$i"
    echo "link set veth$i up"
  done
} | tool ip -batch -
if [ -n "$port_rate_mbit" ]; then
  for i in $(seq "$nodes"); do
    # What the node sends, and what the bridge sends to it. The limit is beyond what queue pairs have under way.
    echo "qdisc add dev veth$i root tbf rate ${port_rate_mbit}mbit burst 128kb limit 64mb"
    echo "qdisc add dev port$i root tbf rate ${port_rate_mbit}mbit burst 128kb limit 64mb"
  done | tool tc -batch -
fi
for i in $(seq "$nodes"); do
  echo "link add $driver$i type $driver netdev veth$i"
done | tool rdma -b /dev/stdin

hostname rdmc-lab
ulimit -l unlimited
ulimit -n 65536
if [ "$mode" = shell ]; then
  setsid -c chroot /mnt/root /bin/sh /run/lab-command <>/dev/tty1 >&0 2>&0
  echo $? >/mnt/run/status
  echo >/mnt/run/complete
else
  # Through pipes and cat, so that the command does not take its output for a terminal.
  mkfifo /mnt/stdout /mnt/stderr
  stty -F /dev/tty1 raw -echo
  stty -F /dev/tty2 raw -echo
  cat /mnt/stdout >/dev/tty1 &
  cat_stdout=$!
  cat /mnt/stderr >/dev/tty2 &
  cat_stderr=$!
  chroot /mnt/root /bin/sh /run/lab-command </dev/null >/mnt/stdout 2>/mnt/stderr
  # At once, for now and then the machine breaks down when all is done.
  echo $? >/mnt/run/status
  # What the command left running would keep the pipes open.
  for dir in /proc/[0-9]*; do
    pid=${dir#/proc/}
    case $pid in
      1 | "$cat_stdout" | "$cat_stderr") ;;
      *) kill -9 "$pid" 2>/dev/null ;;
    esac
  done
  # Something that even SIGKILL does not end must not keep the result back.
  (
    sleep 10
    echo "lab: a process of the command does not end" >/dev/kmsg
    kill "$cat_stdout" "$cat_stderr"
  ) &
  wait "$cat_stdout" "$cat_stderr"
  echo >/mnt/run/complete
fi
sync
poweroff -f
