#!/usr/bin/env bash
# Raw text → WordPiece vocabulary → corpus of sentences → BERT on 2 CPU ranks (TP 2) → checkpoint → resume as PP 2 → loss curve.
#
#   bash examples/bert_tiny_cpu.sh [FOLDER]     everything is written below FOLDER (default: bert)
#   STEPS=40 bash examples/bert_tiny_cpu.sh     a shorter run; the default is 300 steps, five minutes at most on two cores
#
# Before it: `make quickstart`, then `source .venv/bin/activate` and `python -m pip install -e ".[data]"` (nltk splits sentences).
# It needs no GPU, and the corpus is the documentation of your own Python. Run it again to continue where it stopped; remove the
# folder to start from scratch. It demonstrates the steps, not a useful model: a BERT is trained on 15 % of the tokens and learns
# slowly, and 300 steps reduce the loss from ln 2048 = 7.6 to 6.1, little more than the frequencies of the word pieces.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-bert}"
steps="${STEPS:-300}"
first=$((steps / 2))
PYTHON="${PYTHON:-python}"
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
step() { printf '\n== %s\n' "$*"; }
at_least_1() { echo $(($1 > 1 ? $1 : 1)); }

step "1. corpus: documentation that ships with Python"
[ -f "$out/corpus.jsonl" ] || "$PYTHON" "$here/tools/build_corpus.py" --output "$out/corpus.jsonl"

step "2. a vocabulary of 2,048 word pieces, trained on it"
[ -f "$out/tokenizer/vocab.txt" ] || "$PYTHON" "$here/tools/train_tokenizer.py" \
    --input "$out/corpus.jsonl" --vocab-size 2048 --kind wordpiece --output "$out/tokenizer"
tokenizer=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$out/tokenizer/vocab.txt")

step "3. sentences on disk, .bin and .idx"
[ -f "$out/corpus_text_sentence.idx" ] || "$PYTHON" "$here/tools/preprocess_data.py" --input "$out/corpus.jsonl" \
    --output-prefix "$out/corpus" --split-sentences "${tokenizer[@]}" --workers 2

# The job that both runs share. The layout is set at each start.
job=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --make-vocab-size-divisible-by 64
    --init-method-std 0.05 --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size 8 --global-batch-size 16 --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine
    --train-iters "$steps" --lr-warmup-iters $((steps / 20)) --weight-decay 0.01 --adam-beta2 0.98 --seed 1234
    --data-path "$out/corpus_text_sentence" --split 95,5,0 "${tokenizer[@]}"
    --eval-interval "$(at_least_1 $((steps / 10)))" --eval-iters 5 --log-interval "$(at_least_1 $((steps / 20)))"
    --save "$out/checkpoints" --load "$out/checkpoints" --save-interval "$(at_least_1 $((steps / 2)))" --save-total-limit 2
    --tensorboard-dir "$out/tensorboard" --metrics-jsonl "$out/metrics.jsonl"
)
torchrun() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$@"; }

step "4. train on 2 ranks, TP 2 with sequence parallelism, and stop after $first of $steps steps"
[ -d "$out/checkpoints" ] || torchrun "$here/pretrain_bert.py" "${job[@]}" --exit-interval "$first" \
    --tensor-model-parallel-size 2 --sequence-parallel

step "5. continue the same job under another layout, PP 2"
torchrun "$here/pretrain_bert.py" "${job[@]}" --pipeline-model-parallel-size 2

step "6. results"
"$PYTHON" "$here/tools/plot_loss.py" --metrics "$out/metrics.jsonl" --output "$out/loss.png" --vocab-size 2048 \
    --mark "$first=PP 2" --mark "0=TP 2" --title "BERT of a million parameters on Python's own documentation"
printf '\nloss curve:   %s\ndashboard:    tensorboard --logdir %s\n' "$out/loss.png" "$out/tensorboard"
