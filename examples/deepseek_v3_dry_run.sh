#!/usr/bin/env bash
# Plan DeepSeek-V3 (arXiv:2412.19437) on 2,048 GPUs, without any: parameters, memory,
# traffic and schedule of every rank, in seconds on a laptop.
#
#     bash examples/deepseek_v3_dry_run.sh [further flags of pretrain_gpt.py]
#
# 61 layers of width 7168, the first 3 dense; 256 experts of width 2048 in the others, of which a token uses 8
# from 4 of 8 groups, and a shared one; sigmoid scores and a bias for balance.
#
# Attention is multi-latent: 187,107,328 weights a layer with its norms, and 671,026,404,352 in all without the
# routers' biases, as the published model has without its next-token-after-next head. --mtp-num-layers 1 adds that:
# 11,610,067,968 weights, beside the embedding and the output layer that it shares.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --multi-latent-attention --num-attention-heads 128 --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0
    --seq-length 4096 --vocab-size 129279          # and the end of a document
)
experts=(
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*58)"
    --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
)
# The data-parallel size, 128, must be a multiple of the expert-parallel size.
layout=(
    --pipeline-model-parallel-size 16 --expert-model-parallel-size 64
    --zero-stage 1 --bf16 --recompute-granularity full
)
run=(
    --micro-batch-size 1 --global-batch-size 15360 --lr 2.2e-4 --train-iters 235000 --mock-data
)
"${PYTHON:-python}" pretrain_gpt.py "${model[@]}" "${experts[@]}" "${layout[@]}" "${run[@]}" \
    --dry-run --world-size 2048 --rank 256 "$@"
