#!/usr/bin/env bash
# A model trained with 512 tokens reads 4,096: its rotary frequencies are scaled (YaRN), then it is trained a little more.
# Prints the validation loss at 4,096 tokens before scaling, after scaling, and after training.
#
#   bash examples/lengthen_context_cpu.sh [FOLDER]      everything is written below FOLDER (default: longer)
#   STEPS=100 bash examples/lengthen_context_cpu.sh     a shorter run; the default is 400 steps, then 40 at the new length
#   SHORT=128 LONG=512 bash examples/lengthen_context_cpu.sh     other lengths
#
# Two ranks on the CPU. Before it: `make quickstart`, then `source .venv/bin/activate`. It needs no GPU and downloads nothing: the
# corpus is the documentation of your own Python. Remove the folder to start from scratch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-longer}"
steps="${STEPS:-400}"
short="${SHORT:-512}"
long="${LONG:-4096}"
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

# All runs have this model.
job=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --make-vocab-size-divisible-by 64
    --normalization RMSNorm --swiglu --disable-bias-linear --init-method-std 0.06
    --hidden-dropout 0 --attention-dropout 0
    --weight-decay 0.1 --adam-beta2 0.95 --seed 1234 --lr-decay-style cosine
    --data-path "$out/corpus_text_document" --split 95,5,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer"
    --eval-interval "$(at_least_1 "$steps")" --log-interval "$(at_least_1 $((steps / 20)))"
)
brief=(--seq-length "$short" --position-embedding-type rope --micro-batch-size 4 --global-batch-size 8 --lr 2e-3
       --eval-iters "$(at_least_1 $((steps / 40)))")
# Sequences of the new length, of the weights alone: --finetune allows other positions and other data.
longer=(--seq-length "$long" --micro-batch-size 1 --global-batch-size 2 --lr 5e-4 --eval-iters "$(at_least_1 $((steps / 40)))"
        --load "$out/short" --finetune)
yarn=(--position-embedding-type yarn --original-max-position-embeddings "$short" --max-position-embeddings "$long")
run() {                 # metrics file, flags …
    [ -f "$out/$1.jsonl" ] && return
    "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$here/pretrain_gpt.py" "${job[@]}" "${@:2}" \
        --metrics-path "$out/$1.part"
    mv "$out/$1.part" "$out/$1.jsonl"
}

step "2. train with sequences of $short tokens"
run short "${brief[@]}" --train-iters "$steps" --lr-warmup-iters "$(at_least_1 $((steps / 20)))" --save "$out/short"

step "3. evaluate at $long tokens: as it is, and with scaled frequencies"
run as_it_is "${longer[@]}" --position-embedding-type rope --train-iters 0
run scaled "${longer[@]}" "${yarn[@]}" --train-iters 0

step "4. train with $long tokens and scaled frequencies, a tenth of the steps"
run trained "${longer[@]}" "${yarn[@]}" --train-iters "$(at_least_1 $((steps / 10)))" --save "$out/long"

step "5. validation loss"
"$PYTHON" - "$out" "$short" "$long" <<'PY'
import sys
from pathlib import Path
from megatron_ds.training.observe.metrics_file import read_metrics
folder, short, long = sys.argv[1:]
for name, length, what in (("short", short, "trained at this length"), ("as_it_is", long, "the same model"),
                           ("scaled", long, "frequencies scaled"), ("trained", long, "and trained at this length")):
    loss = [r["loss"] for r in read_metrics(Path(folder, f"{name}.jsonl")) if r["kind"] == "validation"][-1]
    print(f"{int(length):7,} tokens {loss:9.4f}   {what}")
PY
