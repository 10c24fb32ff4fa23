#!/usr/bin/env bash
# Raw text → tokenizer → dataset → GPT on 4 CPU ranks (TP 2 × PP 2) → checkpoint → resume as TP 1 × PP 2 × DP 2 → text.
#
#   bash examples/gpt_tiny_cpu.sh [FOLDER]      everything is written below FOLDER (default: quickstart)
#
# About three minutes on two cores, no GPU, nothing is downloaded: the corpus is your own Python's documentation.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-quickstart}"
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
PYTHON="${PYTHON:-python}"
step() { printf '\n== %s\n' "$*"; }

step "1. corpus: documentation that ships with Python"
[ -f "$out/corpus.jsonl" ] || "$PYTHON" "$here/tools/build_corpus.py" --output "$out/corpus.jsonl"

step "2. a byte-pair tokenizer of 2,048 entries, trained on it"
[ -f "$out/tokenizer/tokenizer.json" ] || "$PYTHON" "$here/tools/train_tokenizer.py" \
    --input "$out/corpus.jsonl" --vocab-size 2048 --output "$out/tokenizer"

step "3. tokens on disk, .bin and .idx"
[ -f "$out/corpus_text_document.idx" ] || "$PYTHON" "$here/tools/preprocess_data.py" --input "$out/corpus.jsonl" \
    --output-prefix "$out/corpus" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" \
    --append-eod --workers 2

# What both runs share. The layout is not part of it.
job=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 64
    --micro-batch-size 8 --global-batch-size 32 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
    --lr-decay-iters 240 --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234
    --zero-stage 1
    --data-path "$out/corpus_text_document" --split 949,50,1
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer"
    --eval-interval 60 --eval-iters 4 --log-interval 10
    --save "$out/checkpoints" --load "$out/checkpoints" --save-interval 120 --save-total-limit 2
    --tensorboard-dir "$out/tensorboard" --metrics-jsonl "$out/metrics.jsonl"
)
torchrun() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 "$@"; }

step "4. train on 4 ranks: TP 2 × PP 2, stop after 120 steps"
torchrun "$here/pretrain_gpt.py" "${job[@]}" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --train-iters 240 --exit-interval 120

step "5. the same command resumes at another layout: TP 1 × PP 2 × DP 2"
torchrun "$here/pretrain_gpt.py" "${job[@]}" --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 \
    --train-iters 240

step "6. what it learned"
"$PYTHON" "$here/tools/plot_loss.py" --metrics "$out/metrics.jsonl" --output "$out/loss.png"
"$PYTHON" "$here/tools/generate_text.py" --load "$out/checkpoints" --prompt "Return the" --max-new-tokens 80 \
    --temperature 0.8 --top-k 40 --seed 1 --tokenizer-model "$out/tokenizer"
printf '\nloss curve:   %s\ndashboard:    tensorboard --logdir %s\n' "$out/loss.png" "$out/tensorboard"
