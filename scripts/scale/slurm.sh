#!/usr/bin/env bash
# A real SLURM of one node, made for this and removed afterwards: an array of 8 jobs from examples/slurm, of which one
# is killed, one requeued, and one stopped as before its time limit; then the index and verify, and a comparison with one
# run. Needs root, Debian's slurm-wlm and munge, featcache in PATH, and a Python that has it (PYTHON=…). About 30,000
# short clips keep the jobs busy for the few seconds that this needs.
#
#   scripts/scale/slurm.sh MANIFEST ROOT      a manifest, and the folder of its audio
set -eu
manifest=$(realpath "$1") root=$(realpath "$2")
repository=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
work=$(mktemp -d /tmp/featcache-slurm.XXXXXX)
for program in munged slurmctld slurmd sbatch featcache; do
    command -v "$program" > /dev/null || { echo "$program is missing: apt-get install slurm-wlm munge" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "slurmd needs root" >&2; exit 2; }

pids=()
finish() {
    trap - EXIT
    scancel --user root 2> /dev/null || true
    for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null || true; done
    sleep 1
    for pid in "${pids[@]}"; do kill -KILL "$pid" 2> /dev/null || true; done
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap finish EXIT

echo "== a SLURM of one node, in $work"
mkdir -p "$work"/{state,spool,munge,home}
chmod 711 "$work"
dd if=/dev/urandom of="$work/munge/key" bs=1024 count=1 status=none
chown -R munge: "$work/munge"
chmod 700 "$work/munge"
chmod 400 "$work/munge/key"
chmod 711 "$work/munge"
runuser -u munge -- munged --foreground --key-file="$work/munge/key" --socket="$work/munge/socket" \
    --pid-file="$work/munge/pid" --log-file="$work/munge/log" --seed-file="$work/munge/seed" --force \
    > "$work/munge.out" 2>&1 &
pids+=($!)
host=$(hostname -s)
cpus=$(nproc)
cat > "$work/slurm.conf" <<CONF
ClusterName=scale
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
MinJobAge=3600
KillWait=10
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$work/slurm.conf
sleep 1
slurmctld -D -c -f "$SLURM_CONF" > "$work/slurmctld.out" 2>&1 &
pids+=($!)
sleep 2
slurmd -D -f "$SLURM_CONF" -N "$host" > "$work/slurmd.out" 2>&1 &
pids+=($!)
for _ in $(seq 30); do sinfo -h -o %T 2> /dev/null | grep -q idle && break || sleep 1; done
sinfo

cd "$work"
export MANIFEST=$manifest CACHE=$work/features OPTIONS="--root $root --device cpu --shard-size ${SHARD_SIZE:-1}"
echo "== an array of 8"
sed 's/--cpus-per-task=[0-9]*$/--cpus-per-task=1/; s/--mem=.*/--mem=0/' "$repository/examples/slurm/extract.sbatch" > extract.sbatch
sed 's/--cpus-per-task=[0-9]*$/--cpus-per-task=1/; s/--mem=.*/--mem=0/' "$repository/examples/slurm/index.sbatch" > index.sbatch
array=$(sbatch --parsable --array=0-7 extract.sbatch)
index=$(sbatch --parsable --dependency="afterany:$array" index.sbatch)
running() { squeue -h -t RUNNING -j "$1" -o %i | grep -q .; }
state() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p' | head -1; }
shards() { find "$CACHE"/*/shards -mindepth 1 -maxdepth 1 -type d 2> /dev/null | wc -l; }
wait_for() { for _ in $(seq 1200); do "$@" && return || sleep 0.1; done; echo "never: $*" >&2; exit 1; }
pid_of() { pgrep -f "^[^ ]*python[^ ]* .*featcache extract.*" | while read -r pid; do
    tr '\0' '\n' < "/proc/$pid/environ" 2> /dev/null | grep -qx "SLURM_ARRAY_TASK_ID=$1" && echo "$pid"; done | head -1 || true; }

wait_for running "${array}_0"
has_pid() { [ -n "$(pid_of "$1")" ]; }
has_made() { [ "$(shards)" -ge "$1" ]; }
wait_for has_pid 0
wait_for has_made 4
pid=$(pid_of 0)
echo "== SIGKILL of job 0's featcache, process $pid, with $(shards) shards there"
kill -KILL "$pid"
wait_for running "${array}_1"
wait_for has_pid 1
wait_for has_made $(($(shards) + 6))
echo "== scontrol requeue of job 1, with $(shards) shards there"
scontrol requeue "${array}_1"
wait_for running "${array}_2"
wait_for has_pid 2
wait_for has_made $(($(shards) + 6))
echo "== SIGTERM to job 2's featcache, as --signal=TERM@300 sends before the time limit, with $(shards) shards there"
kill -TERM "$(pid_of 2)"
is_over() { ! squeue -h -j "$1" -o %i 2> /dev/null | grep -q .; }
for _ in $(seq 600); do is_over "$array" && break || sleep 1; done
for number in $(seq 0 7); do
    scontrol show job "${array}_$number" | grep -E "JobState|Restarts|ExitCode" | sed "s/^ */job $number: /"
done
for _ in $(seq 120); do is_over "$index" && break || sleep 1; done
echo "== index and verify, after a job that was killed: it must say what is missing"
cat featcache-index-"$index".log
[ "$(state "$index")" = FAILED ]
echo "== job 0 again, under the number that it had"
OPTIONS="$OPTIONS" sbatch --wait --parsable --cpus-per-task=1 --output=again.log \
    --wrap "srun --ntasks=1 featcache extract '$MANIFEST' -o '$CACHE' --threads 1 --partition 0/8 $OPTIONS" || [ $? = 3 ]
tail -3 again.log
code=0
index=$(sbatch --wait --parsable index.sbatch) || code=$?
cat featcache-index-"$index".log
[ $code = 0 ] || [ $code = 3 ]
echo "== one run, compared"
featcache extract "$MANIFEST" -o "$work/whole" $OPTIONS --threads "$cpus" > /dev/null || [ $? = 3 ]
"${PYTHON:-python3}" - "$CACHE" "$work/whole" << 'PYTHON'
import sys
import featcache
array, whole = (featcache.open(path, strict=True) for path in sys.argv[1:])
assert list(array.ids) == list(whole.ids)
assert all((array[id_] == whole[id_]).all() for id_ in whole.ids)
print(f"{len(whole):,} items are equal, bit for bit, and in the same order")
PYTHON
echo "== the logs of job 0, which was killed, of job 1, which was requeued, and of job 2, which was stopped"
cat featcache-"$array"_[012].log
