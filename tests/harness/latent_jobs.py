"""Flags of tiny models with multi-latent attention."""

from megatron_ds.config import parse

LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12 "
    "--qk-layernorm --q-lora-rank 24"
).split()
YARN = (
    "--rope-type yarn --rotary-scaling-factor 4 --mscale 1.0 --mscale-all-dim 0.7 "
    "--original-max-position-embeddings 12"
).split()
SIZES = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 101 --make-vocab-size-divisible-by 4 --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0"
).split()
RUN = "--mock-data --lr 1e-3 --train-iters 4 --micro-batch-size 1 --global-batch-size 4".split()
# DeepSeek-V3's: a dense layer first, groups of experts, a shared one.
EXPERTS = (
    "--num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 32 --moe-layer-freq ([0]*1+[1]*2) "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4 "
    "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 32 "
    "--moe-router-load-balancing-type none --num-layers 3"
).split()


def latent_config(*flags: str, rank_of_queries: bool = True):
    """The configuration of one process. rank_of_queries: whether queries have a latent"""
    own = LATENT if rank_of_queries else LATENT[:-2]
    return parse([*SIZES, *own, *RUN, *flags], world_size=1)
