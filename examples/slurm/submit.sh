#!/bin/bash
# Extracts a manifest with an array of jobs, then builds the index and verifies it:
#
#   examples/slurm/submit.sh train.csv /lustre/me/features 8 --partition=gpu --gres=gpu:1
#
# What follows the number of jobs are options of sbatch, for the array and for the job after it, which needs no GPU:
# INDEX_OPTIONS='--partition=cpu --gres=none' come after them for that one. OPTIONS='-c hubert-base-l6' are featcache's.
set -eu
MANIFEST=$(realpath "$1") CACHE=$(realpath -m "$2") jobs=$3
export MANIFEST CACHE
shift 3
here=$(dirname "$(realpath "$0")")
# Of the same shape for each job: the partition follows from the array, 0 to jobs - 1.
array=$(sbatch --parsable --array="0-$((jobs - 1))" "$@" "$here/extract.sbatch")
# shellcheck disable=SC2086 (they are several)
index=$(sbatch --parsable --dependency="afterany:$array" "$@" ${INDEX_OPTIONS:-} "$here/index.sbatch")
echo "array $array, then index and verify $index"
