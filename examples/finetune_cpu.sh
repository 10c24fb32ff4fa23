#!/usr/bin/env bash
# A small GPT, trained on text, becomes one that answers: conversations → tokens and masks → finetuning on the answers.
#
#   bash examples/finetune_cpu.sh [FOLDER]      everything is written below FOLDER (default: finetune)
#
# It needs no GPU and downloads nothing: text and questions are from the documentation of your own Python. Run it again to
# continue where it stopped; remove the folder to start from scratch.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-finetune}"
PYTHON="${PYTHON:-python}"
BASE_STEPS="${BASE_STEPS:-200}"
STEPS="${STEPS:-120}"
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
step() { printf '\n== %s\n' "$*"; }
torchrun() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$here/pretrain_gpt.py" "$@"; }
words=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer")

step "1. text, a tokenizer, and tokens"
[ -f "$out/corpus.jsonl" ] || "$PYTHON" "$here/tools/build_corpus.py" --output "$out/corpus.jsonl"
[ -f "$out/tokenizer/tokenizer.json" ] || "$PYTHON" "$here/tools/train_tokenizer.py" \
    --input "$out/corpus.jsonl" --vocab-size 2048 --output "$out/tokenizer"
[ -f "$out/corpus_text_document.idx" ] || "$PYTHON" "$here/tools/preprocess_data.py" --input "$out/corpus.jsonl" \
    --output-prefix "$out/corpus" "${words[@]}" --append-eod

model=(
    --num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --make-vocab-size-divisible-by 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --init-method-std 0.06
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --global-batch-size 8 --adam-beta2 0.95 --seed 1234
    --eval-iters 0 --split 100,0,0 --zero-stage 1 "${words[@]}"
)

step "2. a model that continues text"
[ -d "$out/base" ] || torchrun "${model[@]}" --data-path "$out/corpus_text_document" --train-iters "$BASE_STEPS" \
    --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters $((BASE_STEPS / 20)) --log-interval 20 --save "$out/base"

step "3. conversations, with a mask of their answers"
cat > "$out/chat_template.jinja" <<'TEMPLATE'
{% for message in messages %}{% if message.role == 'assistant' %}Answer: {{ message.content }}<|endoftext|>
{% else %}Question: {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}
TEMPLATE
[ -f "$out/chats.jsonl" ] || "$PYTHON" "$here/examples/python_chats.py" --output "$out/chats.jsonl"
[ -f "$out/chats_chat_document.idx" ] || "$PYTHON" "$here/tools/preprocess_data.py" --chat --input "$out/chats.jsonl" \
    --chat-template "$out/chat_template.jinja" --output-prefix "$out/chats" "${words[@]}"
"$PYTHON" "$here/tools/inspect_dataset.py" "$out/chats_chat_document" --document 3 "${words[@]}"

step "4. train on the answers"
[ -d "$out/chat" ] || torchrun "${model[@]}" --sft --data-path "$out/chats_chat_document" --load "$out/base" --finetune \
    --save "$out/chat" --train-iters "$STEPS" --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters $((STEPS / 24)) \
    --log-interval 10

step "5. the same question to both"
ask() {
    "$PYTHON" "$here/tools/generate_text.py" --load "$1" --tokenizer-model "$out/tokenizer" --greedy \
        --max-new-tokens 40 --prompt $'Question: What does math.sqrt do?\nAnswer:'
}
printf '\nbefore:\n' && ask "$out/base"
printf '\nafter:\n' && ask "$out/chat"
