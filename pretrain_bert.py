"""Pretrain a BERT: some tokens of a pair of segments are masked and guessed; and do the segments stand in the
right order?

On a laptop, one process, made-up sentences, no files needed:

    python pretrain_bert.py --mock-data --vocab-size 512 --num-layers 2 --hidden-size 64 --num-attention-heads
    4 \
        --seq-length 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3

Real text takes a corpus of sentences (tools/preprocess_data.py --split-sentences) and a tokenizer with [CLS],
[SEP], [MASK] and [PAD]; docs/use/bert.md has the way. All flags: python pretrain_bert.py --help, or
docs/reference/flags.md; the plan alone: --dry-run.
"""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("train-bert")
