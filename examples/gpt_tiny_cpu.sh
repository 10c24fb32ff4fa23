#!/usr/bin/env bash
# Raw text → tokenizer → dataset → GPT on 4 CPU ranks (TP 2 × PP 2) → checkpoint → resume as TP 1 × PP 2 × DP 2 → text.
#
#   bash examples/gpt_tiny_cpu.sh [FOLDER]      everything is written below FOLDER (default: quickstart)
#   STEPS=100 bash examples/gpt_tiny_cpu.sh     a shorter run; the default is 640 steps, two to three minutes on two cores
#
# It needs no GPU and downloads nothing: the corpus is the documentation of your own Python. Run it again to continue where it
# stopped; remove the folder to start from scratch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-quickstart}"
steps="${STEPS:-640}"
first=$((steps / 5))
PYTHON="${PYTHON:-python}"
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
step() { printf '\n== %s\n' "$*"; }
at_least_1() { echo $(($1 > 1 ? $1 : 1)); }

step "1. corpus: documentation that ships with Python"
[ -f "$out/corpus.jsonl" ] || "$PYTHON" "$here/tools/build_corpus.py" --output "$out/corpus.jsonl"

step "2. a byte-pair tokenizer of 2,048 entries, trained on it"
[ -f "$out/tokenizer/tokenizer.json" ] || "$PYTHON" "$here/tools/train_tokenizer.py" \
    --input "$out/corpus.jsonl" --vocab-size 2048 --output "$out/tokenizer"

step "3. tokens on disk, .bin and .idx"
[ -f "$out/corpus_text_document.idx" ] || "$PYTHON" "$here/tools/preprocess_data.py" --input "$out/corpus.jsonl" \
    --output-prefix "$out/corpus" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" \
    --append-eod --workers 2

# The job that both runs share. The layout and the micro-batch size, which depends on the layout, are set at each start.
# A model of a million parameters learns most from many small batches and from initial weights larger than usual.
job=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --make-vocab-size-divisible-by 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --init-method-std 0.06
    --hidden-dropout 0 --attention-dropout 0
    --global-batch-size 8 --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine
    --train-iters "$steps" --lr-warmup-iters $((steps / 25)) --weight-decay 0.1 --adam-beta2 0.95 --seed 1234
    --zero-stage 1
    --data-path "$out/corpus_text_document" --split 95,5,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer"
    --eval-interval "$(at_least_1 $((steps / 10)))" --eval-iters "$(at_least_1 $((steps / 64)))" --log-interval "$(at_least_1 $((steps / 40)))"
    --save "$out/checkpoints" --load "$out/checkpoints" --save-interval "$(at_least_1 $((steps / 2)))" --save-total-limit 2
    --tensorboard-dir "$out/tensorboard" --metrics-jsonl "$out/metrics.jsonl"
)
torchrun() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 "$@"; }

step "4. train on 4 ranks, TP 2 × PP 2, and stop after $first of $steps steps"
[ -d "$out/checkpoints" ] || torchrun "$here/pretrain_gpt.py" "${job[@]}" --exit-interval "$first" \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4

step "5. continue the same job under another layout, TP 1 × PP 2 × DP 2"
torchrun "$here/pretrain_gpt.py" "${job[@]}" --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 \
    --micro-batch-size 2

step "6. results"
"$PYTHON" "$here/tools/plot_loss.py" --metrics "$out/metrics.jsonl" --output "$out/loss.png" --vocab-size 2048 \
    --mark "$first=TP 1 × PP 2 × DP 2" --mark "0=TP 2 × PP 2" --title "GPT of a million parameters on Python's own documentation"
printf '\nSample text from the trained model:\n\n'
"$PYTHON" "$here/tools/generate_text.py" --load "$out/checkpoints" --prompt "If the file" --min-new-tokens 80 --max-new-tokens 120 \
    --temperature 0.6 --top-p 0.9 --seed 1 --tokenizer-model "$out/tokenizer"
printf '\nloss curve: %s\n' "$out/loss.png"

# A new shell has no Python with torch in its PATH: where $PYTHON belongs to a virtual environment, print how to activate it.
activate="$("$PYTHON" -c 'import os, shlex, sys
path = os.path.join(sys.prefix, "bin", "activate")
inside = path.startswith(os.getcwd() + os.sep)
print("source", shlex.quote(os.path.relpath(path) if inside else path)) if os.path.exists(path) else None')"
tools="$here/tools"
[ "$here" != "$PWD" ] || tools=tools
printf '\nCommands to try next:\n\n'
[ -z "$activate" ] || printf '    %s\n' "$activate"
printf '    python %q --load %q --prompt "The value" --temperature 0.6\n' "$tools/generate_text.py" "$out/checkpoints"
printf '    tensorboard --logdir %q\n' "$out/tensorboard"
