"""Pretrain a GPT: GPT-2/3 style by default, Llama style with --position-embedding-type rope --swiglu ….

On a laptop, one process, random tokens, no files needed:

    python pretrain_gpt.py --mock-data --vocab-size 512 --num-layers 2 --hidden-size 64 \
        --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3

Four CPU ranks as TP 2 × PP 2:  torchrun --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 …
All flags: python pretrain_gpt.py --help, or docs/reference/flags.md.
"""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("train")
