#!/usr/bin/env bash
# GPT-3 125M or 345M (Brown et al. 2020, arXiv:2005.14165, table 2.1) with torchrun, on one or several nodes: 300 billion tokens.
#
#   bash examples/gpt3_torchrun.sh 125m                             one node with 8 GPUs
#   NNODES=2 HEAD=node1 bash examples/gpt3_torchrun.sh 345m         the same command on both nodes; node1 is one of them
#
# Environment variables and their defaults: GPUS per node (8), DATA (corpus_text_document), VOCAB and MERGES (vocab.json,
# merges.txt), SAVE (runs/gpt3-SIZE). Run the same command again to continue from the last checkpoint; the number of nodes and
# GPUs may change.
set -euo pipefail
size="${1:?give the size, 125m or 345m}"
NNODES="${NNODES:-1}" GPUS="${GPUS:-8}" HEAD="${HEAD:-localhost}" SAVE="${SAVE:-runs/gpt3-$size}"

case "$size" in
    125m) model=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --lr 6e-4 --min-lr 6e-5 --micro-batch-size 8) ;;
    345m) model=(--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --lr 3e-4 --min-lr 3e-5 --micro-batch-size 4) ;;
    *) echo "size $size is not known. Use 125m or 345m." >&2; exit 2 ;;
esac

job=(
    "${model[@]}" --seq-length 2048 --global-batch-size 256 --bf16 --attention-dropout 0 --hidden-dropout 0
    # In samples of 2,048 tokens: 300 billion tokens, 375 million of warm-up, the minimum learning rate after 260 billion.
    --train-samples 146484375 --lr-warmup-samples 183105 --lr-decay-samples 126953125 --lr-decay-style cosine
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --zero-stage 1
    --data-path "${DATA:-corpus_text_document}" --split 98,2,0
    --tokenizer-type GPT2BPETokenizer --vocab-file "${VOCAB:-vocab.json}" --merge-file "${MERGES:-merges.txt}"
    --eval-interval 1000 --eval-iters 20 --log-interval 10
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --save-total-limit 3 --tensorboard-dir "$SAVE/tensorboard"
)

# On SIGTERM torchrun forwards the signal and kills the remaining ranks after 30 seconds, possibly in the middle of a save:
# --shutdown-timeout allows more (torch 2.12 and later). SIGUSR1 is forwarded only if --signals-to-handle lists it. In both cases
# the ranks save and exit with code 0, but torchrun itself exits with code 1 because it was terminated: the last saved step is in
# latest_checkpointed_iteration.txt.
torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS" --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id "gpt3-$size" \
    --shutdown-timeout 600 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    pretrain_gpt.py "${job[@]}"
