#!/usr/bin/env bash
# Raw text → GPT with 8 experts on 4 CPU ranks (EP 2 × TP 2) → checkpoint → resume as EP 4 × TP 1 → load over training → text.
#
#   bash examples/moe_tiny_cpu.sh [FOLDER]      everything is written below FOLDER (default: moe)
#   STEPS=100 bash examples/moe_tiny_cpu.sh     a shorter run; the default is 480 steps, five minutes of processor time
#
# Each token passes 2 of the 8 experts of a layer. Corpus and tokenizer are those of gpt_tiny_cpu.sh: the documentation of your
# own Python. No GPU, no downloads. Run it again to continue where it stopped; remove the folder to start from scratch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-moe}"
steps="${STEPS:-480}"
first=$((steps / 3))
PYTHON="${PYTHON:-python}"
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
step() { printf '\n== %s\n' "$*"; }
at_least() { echo $(($2 > $1 ? $2 : $1)); }

step "1. corpus, tokenizer, tokens"
[ -f "$out/corpus.jsonl" ] || "$PYTHON" "$here/tools/build_corpus.py" --output "$out/corpus.jsonl"
[ -f "$out/tokenizer/tokenizer.json" ] || "$PYTHON" "$here/tools/train_tokenizer.py" \
    --input "$out/corpus.jsonl" --vocab-size 2048 --output "$out/tokenizer"
[ -f "$out/corpus_text_document.idx" ] || "$PYTHON" "$here/tools/preprocess_data.py" --input "$out/corpus.jsonl" \
    --output-prefix "$out/corpus" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" \
    --append-eod --workers 2

# An expert has half the width of the quickstart's feed-forward, so that two of them cost as much as one of those. Layer 0 is dense.
job=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --make-vocab-size-divisible-by 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --init-method-std 0.06
    --hidden-dropout 0 --attention-dropout 0
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 176 --moe-layer-freq "[0,1,1,1]"
    --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001
    --global-batch-size 8 --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine
    --train-iters "$steps" --lr-warmup-iters $((steps / 24)) --weight-decay 0.1 --adam-beta2 0.95 --seed 1234
    --zero-stage 1
    --data-path "$out/corpus_text_document" --split 95,5,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer"
    --eval-interval "$(at_least 4 $((steps / 8)))" --eval-iters "$(at_least 1 $((steps / 48)))" --log-interval "$(at_least 1 $((steps / 120)))"
    --save "$out/checkpoints" --load "$out/checkpoints" --save-interval "$(at_least 1 $((steps / 2)))" --save-total-limit 2
    --tensorboard-dir "$out/tensorboard" --metrics-jsonl "$out/metrics.jsonl"
)
torchrun() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 "$@"; }

step "2. train on 4 ranks, EP 2 × TP 2, and stop after $first of $steps steps"
[ -d "$out/checkpoints" ] || torchrun "$here/pretrain_gpt.py" "${job[@]}" --exit-interval "$first" --micro-batch-size 2 \
    --expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel

step "3. continue the same job under another layout, EP 4 × TP 1"
torchrun "$here/pretrain_gpt.py" "${job[@]}" --expert-model-parallel-size 4 --micro-batch-size 2

step "4. results"
"$PYTHON" "$here/tools/plot_loss.py" --metrics "$out/metrics.jsonl" --output "$out/loss.png" --vocab-size 2048 \
    --mark "$first=EP 4 × TP 1" --mark "0=EP 2 × TP 2" --title "GPT with 8 experts a layer on Python's own documentation"
"$PYTHON" "$here/tools/plot_expert_load.py" --metrics "$out/metrics.jsonl" --output "$out/expert_load.png"
printf '\nSample text from the trained model:\n\n'
"$PYTHON" "$here/tools/generate_text.py" --load "$out/checkpoints" --prompt "If the file" --min-new-tokens 80 --max-new-tokens 120 \
    --temperature 0.6 --top-p 0.9 --seed 1 --tokenizer-model "$out/tokenizer"
printf '\nloss curve: %s\nload of the experts: %s\n' "$out/loss.png" "$out/expert_load.png"
