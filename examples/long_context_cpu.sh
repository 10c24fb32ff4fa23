#!/usr/bin/env bash
# Raw text → GPT on sequences of 32,768 tokens, which 4 CPU ranks share (CP 4) → checkpoint → resume on one rank (CP 1) → loss curve.
#
#   bash examples/long_context_cpu.sh [FOLDER]     everything is written below FOLDER (default: long_context)
#   STEPS=6 LENGTH=4096 bash examples/long_context_cpu.sh     fewer steps, shorter sequences; the defaults are 12 and 32768
#   COMM=a2a bash examples/long_context_cpu.sh     Ulysses instead of a ring; all_gather is the third
#
# Corpus and tokenizer are those of gpt_tiny_cpu.sh: the documentation of your own Python. No GPU, no downloads. Run it again to
# continue where it stopped; remove the folder to start from scratch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-long_context}"
steps="${STEPS:-12}" length="${LENGTH:-32768}" comm="${COMM:-p2p}"
first=$((steps / 2))
PYTHON="${PYTHON:-python}"
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
step() { printf '\n== %s\n' "$*"; }
at_least_1() { echo $(($1 > 1 ? $1 : 1)); }

step "1. corpus, tokenizer, tokens"
[ -f "$out/corpus.jsonl" ] || "$PYTHON" "$here/tools/build_corpus.py" --output "$out/corpus.jsonl"
[ -f "$out/tokenizer/tokenizer.json" ] || "$PYTHON" "$here/tools/train_tokenizer.py" \
    --input "$out/corpus.jsonl" --vocab-size 2048 --output "$out/tokenizer"
[ -f "$out/corpus_text_document.idx" ] || "$PYTHON" "$here/tools/preprocess_data.py" --input "$out/corpus.jsonl" \
    --output-prefix "$out/corpus" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" \
    --append-eod --workers 2

# Logits of a long sequence are its largest tensor, so the head and the loss compute them in parts.
job=(
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --seq-length "$length"
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear
    --init-method-std 0.06 --hidden-dropout 0 --attention-dropout 0 --cross-entropy-chunks 8
    --micro-batch-size 1 --global-batch-size 1 --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine
    --train-iters "$steps" --lr-warmup-iters 1 --weight-decay 0.1 --adam-beta2 0.95 --seed 1234 --zero-stage 1
    --data-path "$out/corpus_text_document" --split 80,20,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer"
    --eval-interval "$(at_least_1 $((steps / 4)))" --eval-iters 1 --log-interval 1
    --save "$out/checkpoints" --load "$out/checkpoints" --save-interval "$(at_least_1 $((steps / 2)))" --save-total-limit 2
    --metrics-jsonl "$out/metrics.jsonl"
)

step "2. what four ranks hold and send"
"$PYTHON" "$here/pretrain_gpt.py" "${job[@]}" --context-parallel-size 4 --cp-comm-type "$comm" --dry-run cpu --world-size 4

step "3. train on 4 ranks, CP 4, and stop after $first of $steps steps"
[ -d "$out/checkpoints" ] || "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 "$here/pretrain_gpt.py" \
    "${job[@]}" --context-parallel-size 4 --cp-comm-type "$comm" --exit-interval "$first"

step "4. continue the same job on one rank, CP 1"
OMP_NUM_THREADS=4 "$PYTHON" "$here/pretrain_gpt.py" "${job[@]}"

step "5. results"
"$PYTHON" "$here/tools/plot_loss.py" --metrics "$out/metrics.jsonl" --output "$out/loss.png" --vocab-size 2048 \
    --mark "$first=CP 1" --mark "0=CP 4" --title "GPT on sequences of $length tokens"
printf '\nloss curve: %s\n' "$out/loss.png"
