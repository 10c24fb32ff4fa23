#!/usr/bin/env bash
# A curriculum over lengths and random layer-wise token dropping, beside a plain run, on two CPU ranks (TP 2 with sequence
# parallelism): the same model, samples and learning rates. Prints the tokens, time and validation loss of each run.
#
#   bash examples/data_efficiency_cpu.sh [FOLDER]      everything is written below FOLDER (default: data_efficiency)
#   STEPS=100 bash examples/data_efficiency_cpu.sh     a shorter run; the default is 400 steps, five minutes on two cores
#
# Before it: `make quickstart`, then `source .venv/bin/activate`. It needs no GPU and downloads nothing: the corpus is the
# documentation of your own Python. Remove the folder to start from scratch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-data_efficiency}"
steps="${STEPS:-400}"
PYTHON="${PYTHON:-python}"
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
step() { printf '\n== %s\n' "$*"; }

step "1. corpus, tokenizer, tokens"
[ -f "$out/corpus.jsonl" ] || "$PYTHON" "$here/tools/build_corpus.py" --output "$out/corpus.jsonl"
[ -f "$out/tokenizer/tokenizer.json" ] || "$PYTHON" "$here/tools/train_tokenizer.py" \
    --input "$out/corpus.jsonl" --vocab-size 2048 --output "$out/tokenizer"
[ -f "$out/corpus_text_document.idx" ] || "$PYTHON" "$here/tools/preprocess_data.py" --input "$out/corpus.jsonl" \
    --output-prefix "$out/corpus" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer" \
    --append-eod --workers 2

# A DeepSpeed configuration: sequences grow from 32 to 256 tokens over the first half of the run; blocks 1 to 4 of 6 keep
# 64 tokens at first and all of them after two thirds of the run.
cat > "$out/efficient.json" <<JSON
{"data_efficiency": {
    "enabled": true,
    "data_sampling": {"enabled": true, "curriculum_learning": {"enabled": true, "curriculum_metrics": {"seqlen_truncate": {
        "min_difficulty": 32, "max_difficulty": 256, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": $((steps / 2)), "difficulty_step": 32}}}}},
    "data_routing": {"enabled": true, "random_ltd": {
        "enabled": true, "total_layer_num": 6, "random_ltd_layer_num": 4, "random_ltd_layer_id": [1, 2, 3, 4],
        "model_mask_name": "attention_mask", "model_type": "decoder", "hidden_state_order": "seq_batch_dim",
        "random_ltd_schedule": {"min_value": 64, "max_value": 256, "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": $((2 * steps / 3)), "seq_per_step": 16}}}}}}
JSON

job=(
    --num-layers 6 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --make-vocab-size-divisible-by 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --init-method-std 0.06
    --hidden-dropout 0 --attention-dropout 0
    --micro-batch-size 8 --global-batch-size 8 --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine
    --train-iters "$steps" --lr-warmup-iters $((steps / 20)) --weight-decay 0.1 --adam-beta2 0.95 --seed 1234
    --tensor-model-parallel-size 2 --sequence-parallel
    --data-path "$out/corpus_text_document" --split 95,5,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer"
    --eval-interval "$steps" --eval-iters 10 --log-interval $(((steps + 19) / 20))
)
train() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$here/pretrain_gpt.py" "${job[@]}" "$@"; }

step "2. a plain run"
[ -f "$out/plain.jsonl" ] || { train --metrics-path "$out/plain.part" && mv "$out/plain.part" "$out/plain.jsonl"; }

step "3. a run with short sequences first and token dropping"
[ -f "$out/efficient.jsonl" ] || { train --metrics-path "$out/efficient.part" --deepspeed_config "$out/efficient.json" \
    && mv "$out/efficient.part" "$out/efficient.jsonl"; }

step "4. tokens, time and validation loss of both runs"
"$PYTHON" - "$out" <<'PY'
import sys
from pathlib import Path
from megatron_ds.training.observe.metrics_file import read_metrics
print(f"{'run':10} {'tokens':>10} {'layer tokens':>13} {'seconds':>8} {'validation loss':>16}")
for name in ("plain", "efficient"):
    records = read_metrics(Path(sys.argv[1], f"{name}.jsonl"))
    train = [r for r in records if r["kind"] == "train"]
    seconds = sum((b["step"] - a) * b["step_seconds"] for a, b in zip([0, *(r["step"] for r in train)], train))
    loss = [r["loss"] for r in records if r["kind"] == "validation"][-1]
    print(f"{name:10} {train[-1]['tokens']:10,} {train[-1]['layer_tokens']:13,} {seconds:8.1f} {loss:16.4f}")
PY
