"""Models of transformers that an engine divides over tensor-parallel ranks, and the same trained by plain torch."""

from functools import cache

import torch

import megatron_ds
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.threads import run_ranks

SMALL = {
    "vocab_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **SMALL}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64}
QWEN3 = {**LLAMA, "head_dim": 8}
DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **SMALL, **DRY}
NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# model → sizes: plans of their own and known names; tied and untied output layers; biases after sums; fused and
# gathered layers; norms of heads, whose gradients are partial sums; experts; biases for each head
MODELS = {
    "LlamaForCausalLM": LLAMA,
    "GPT2LMHeadModel": GPT2,
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": {**QWEN3, **ROUTED},
    "MixtralForCausalLM": {**LLAMA, "num_local_experts": 4},
    "Phi3ForCausalLM": {**LLAMA, "pad_token_id": 0},
    "OPTForCausalLM": {
        **SIZES,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
    },
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 4, **SMALL},
    "FalconForCausalLM": {**SIZES, "multi_query": False, "alibi": True},
    "GPTNeoForCausalLM": {"hidden_size": 32, **NEO, **SMALL},
    "T5ForConditionalGeneration": {
        **T5,
        **SMALL,
        "decoder_start_token_id": 0,
        "dropout_rate": 0.0,
    },
    "BertForMaskedLM": {**SIZES, "intermediate_size": 64, **WET},
}
STEPS = 5
SAMPLES = 4
CLIP = 1.0
# some gradients are zero but for rounding (of a key bias), and Adam would make steps of them
OPTIMIZER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}


def make(name, seed=3):
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**MODELS[name])).train()


def batch_of(step):
    """Samples of all data-parallel ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(8, 48, (SAMPLES, 9), generator=generator)


@cache
def plain(name, clip=CLIP):
    """(losses, norms, final weights) of one process without this package."""
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    losses = []
    norms = []
    for step in range(STEPS):
        ids = batch_of(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        most = clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), most)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {k: v.detach().clone() for k, v in model.state_dict().items()}


def config_of(stage, clip=CLIP, size=2, data=2, **more):
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // data,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": OPTIMIZER},
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": size},
        **more,
    }


def train(engine, steps=range(STEPS)):
    """(losses, norms) of an engine, of this rank's part of each batch."""
    data = engine.world.data
    losses = []
    norms = []
    for step in steps:
        ids = batch_of(step).chunk(data.size)[data.rank]
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def trained(engine):
    """(what `train` returns, whole weights)"""
    return train(engine), engine.full_state_dict()


def divided(name, stage, then, data=2, size=2, clip=CLIP, **more):
    """then(engine) on threads: `data` data-parallel ranks of `size` tensor-parallel ones each."""

    def main(rank, world):
        mpu = Mesh(Grid.fit(data * size, tp=size), rank, world.connect)
        config = config_of(stage, clip, size, data, **more)
        engine, *_ = megatron_ds.initialize(model=make(name), config=config, mpu=mpu)
        return then(engine)

    return run_ranks(data * size, main)
