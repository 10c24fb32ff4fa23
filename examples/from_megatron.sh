#!/usr/bin/env bash
# A checkpoint of Megatron-LM → training goes on here, on 2 CPU ranks under another layout → back to Megatron-LM.
#
#   bash examples/from_megatron.sh                              a tiny checkpoint is made first; two minutes at most
#   bash examples/from_megatron.sh MEGATRON_CHECKPOINT FOLDER   yours (its --save), torch or torch_dist; written below FOLDER
#
# VOCAB_SIZE=50257 gives the size of the tokenizer where the arguments in the checkpoint lack it. The training uses random tokens:
# for a real one give --data-path and the tokenizer, and --nproc-per-node for your GPUs. The layout is free.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source="${1:-}"
out="${2:-from_megatron}"
PYTHON="${PYTHON:-python}"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
step() { printf '\n== %s\n' "$*"; }
torchrun() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$@"; }
convert() { "$PYTHON" "$here/tools/convert_checkpoint.py" "$@"; }
mkdir -p "$out"

# The values of the optimizer are those of the run that is continued; --train-iters is its length.
schedule=(--lr 1e-3 --lr-decay-style constant --train-iters 8 --eval-iters 0 --global-batch-size 4 --micro-batch-size 2
    --weight-decay 0.1 --adam-beta2 0.95 --log-interval 2)

if [ -z "$source" ]; then
    source="$out/megatron"
    step "0. a checkpoint as Megatron-LM has it: 4 steps of a tiny Llama, written as torch_dist"
    "$PYTHON" "$here/pretrain_gpt.py" --mock-data --vocab-size 127 --num-layers 2 --hidden-size 32 --num-attention-heads 4 \
        --num-query-groups 2 --ffn-hidden-size 64 --seq-length 32 --position-embedding-type rope --normalization RMSNorm \
        --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \
        "${schedule[@]}" --exit-interval 4 --save "$out/first"
    convert --load "$out/first" --save "$source" --to torch_dist
fi

step "1. the run goes on from it, on 2 ranks (TP 2): model, weights, Adam's state and iteration come from the files"
# The tokenizer of --mock-data has one id more than --vocab-size, the end of a document: N - 1 makes N rows.
torchrun "$here/pretrain_gpt.py" --load "$source" --save "$out/continued" --mock-data --seq-length 32 \
    ${VOCAB_SIZE:+--vocab-size "$((VOCAB_SIZE - 1))"} "${schedule[@]}" --tensor-model-parallel-size 2

step "2. the result as a checkpoint of Megatron-LM"
convert --load "$out/continued" --save "$out/to_megatron" --to torch_dist
