#!/usr/bin/env bash
# A 7B model on the hosts of a file, without a scheduler: pdsh or ssh starts the ranks, of which a host has as many as its slots.
#
#   bash examples/launch_hosts.sh HOSTFILE           lines such as: worker-1 slots=8
#
# The repository and Python are at the same path on every host, and ssh needs no password. .deepspeed_env in this folder or the
# home folder sets variables for all ranks, such as NCCL_SOCKET_IFNAME=eth0. SIGTERM, SIGUSR1 and the first Ctrl-C to this command
# save and stop the run; run it again to continue.
set -euo pipefail
hosts="${1:?give a hostfile}"
SAVE="${SAVE:-runs/llama-7b}"

# Before a long run: are all hosts as fast as the others, and do they see the same folder? NO_CHECK=1 leaves this out.
mkdir -p "$SAVE"
[ -n "${NO_CHECK:-}" ] || python -m megatron_ds launch --hostfile "$hosts" ${LAUNCH:-} \
    --module megatron_ds env --check --folder "$SAVE"

python -m megatron_ds launch --hostfile "$hosts" ${LAUNCH:-} --log-dir "$SAVE/logs" \
    pretrain_gpt.py --config examples/llama_7b.yaml --tensor-model-parallel-size 4 --sequence-parallel --zero-stage 1 \
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --save-total-limit 3
