#!/usr/bin/env bash
# A Llama in a folder of Hugging Face → fine-tuned on 4 ranks (TP 2 × PP 2) → a folder that from_pretrained reads.
#
#   bash examples/finetune_llama.sh                        a tiny Llama is made first; two minutes on two cores
#   bash examples/finetune_llama.sh FOLDER LLAMA           yours, such as Llama-3.2-1B; everything is written below FOLDER
#   STEPS=4 VERIFY= bash examples/finetune_llama.sh        a shorter run without the proof; the default is 40 steps
#
# It needs no GPU for the tiny model and downloads nothing: the corpus is the documentation of your own Python. CORPUS=FILE.jsonl
# gives your texts, {"text": "…"} in each line. Sizes, norms, rotary positions and the tokenizer come from LLAMA's files.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-finetune}"
llama="${2:-}"
steps="${STEPS:-40}"
corpus="${CORPUS:-$out/corpus.jsonl}"
PYTHON="${PYTHON:-python}"
mkdir -p "$out"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
step() { printf '\n== %s\n' "$*"; }
tokens() {      # PREFIX TOKENIZER
    [ -f "$1_text_document.idx" ] || "$PYTHON" "$here/tools/preprocess_data.py" --input "$corpus" --output-prefix "$1" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$2" --append-eod
}
[ -f "$corpus" ] || "$PYTHON" "$here/tools/build_corpus.py" --output "$corpus"

if [ -z "$llama" ]; then
    llama="$out/llama"
    step "0. a tiny Llama: byte-pair tokenizer, $steps steps on one rank, written as Hugging Face has it"
    if [ ! -d "$llama" ]; then
        "$PYTHON" "$here/tools/train_tokenizer.py" --input "$corpus" --vocab-size 1024 --output "$out/tokenizer"
        tokens "$out/corpus" "$out/tokenizer"
        "$PYTHON" "$here/pretrain_gpt.py" --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 \
            --seq-length 64 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
            --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \
            --micro-batch-size 8 --global-batch-size 8 --lr 4e-3 --train-iters "$steps" --eval-iters 0 --log-interval 10 \
            --data-path "$out/corpus_text_document" --split 95,5,0 --save "$out/pretrained" \
            --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$out/tokenizer"
        "$PYTHON" "$here/tools/convert_checkpoint.py" --load "$out/pretrained" --save "$llama" --to huggingface
    fi
fi

step "1. the corpus in tokens of $llama"
tokens "$out/corpus" "$llama"

step "2. fine-tune on 4 ranks, TP 2 × PP 2; --load takes the folder as it is"
[ -d "$out/run" ] || "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 "$here/pretrain_gpt.py" \
    --load "$llama" --save "$out/run" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    --seq-length 64 --micro-batch-size 2 --global-batch-size 8 --lr 1e-4 --lr-decay-style cosine --train-iters "$steps" \
    --eval-iters 0 --log-interval 10 --data-path "$out/corpus_text_document" --split 95,5,0

step "3. back to Hugging Face, with a proof where transformers is installed"
verify="${VERIFY-$("$PYTHON" -c 'import importlib.util; print("--verify" if importlib.util.find_spec("transformers") else "")')}"
"$PYTHON" "$here/tools/convert_checkpoint.py" --load "$out/run" --save "$out/finetuned" --to huggingface $verify
printf '\nin Python: transformers.AutoModelForCausalLM.from_pretrained("%s")\n' "$out/finetuned"
