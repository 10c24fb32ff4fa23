"""Logits and gradients of a GPT with multi-latent attention in megatron-core, of a job in a folder.

python -m tests.harness.megatron_latent FOLDER     # reads job.json, writes theirs.pt
"""

import json
import sys
from pathlib import Path

from tests.harness.latent_jobs import LATENT, SIZES, YARN


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def plain_core() -> type:
    """Causal attention of torch behind the interface of megatron-core's core attention."""
    import torch

    class PlainCore(torch.nn.Module):
        def __init__(self, *_, softmax_scale=None, **__):
            super().__init__()
            self.scale = softmax_scale

        def forward(self, q, k, v, *_, **__):
            heads = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, is_causal=True, scale=self.scale
            )
            return out.permute(2, 0, 1, 3).flatten(2)

    return PlainCore


def latent_config(job: dict):
    """Return megatron-core's configuration of the model of a job."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return MLATransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=96,
        q_lora_rank=job["q_lora_rank"],
        kv_lora_rank=int(flag(LATENT, "--kv-lora-rank")),
        qk_head_dim=int(flag(LATENT, "--qk-head-dim")),
        qk_pos_emb_head_dim=int(flag(LATENT, "--qk-pos-emb-head-dim")),
        v_head_dim=int(flag(LATENT, "--v-head-dim")),
        rope_type=job["rope_type"],
        rotary_scaling_factor=float(flag(YARN, "--rotary-scaling-factor")),
        mscale=float(flag(YARN, "--mscale")),
        mscale_all_dim=float(flag(YARN, "--mscale-all-dim"))
        if job["rope_type"] == "yarn"
        else 0.0,
        original_max_position_embeddings=int(
            flag(YARN, "--original-max-position-embeddings")
        ),
        qk_layernorm=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        params_dtype=torch.float32,
    )


def main(folder: Path) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_latent_attention as latent

    from tests.harness.megatron_core_program import without_gpu

    job = json.loads((folder / "job.json").read_text())
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    latent.HAVE_TE = False
    with without_gpu():
        parallel_state.initialize_model_parallel()
        config = latent_config(job)
        spec = get_gpt_layer_local_spec(
            qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm"
        )
        # megatron-core's own core for these widths needs Transformer Engine.
        spec.submodules.self_attention.submodules.core_attention = plain_core()
        torch.manual_seed(5)
        model = GPTModel(
            config,
            transformer_layer_spec=spec,
            vocab_size=int(flag(SIZES, "--vocab-size")),
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
        tokens = torch.tensor(job["tokens"])
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()
        logits = model(tokens, places, hidden[None, None])
        factor = torch.randn_like(logits)
        (logits * factor).sum().backward()
    torch.save(
        {
            "logits": logits.detach(),
            "factor": factor,
            "weights": {n: p.detach() for n, p in model.named_parameters()},
            "gradients": {n: p.grad for n, p in model.named_parameters()},
        },
        folder / "theirs.pt",
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
