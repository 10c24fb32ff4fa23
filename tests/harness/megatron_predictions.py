"""Losses and gradients of a tiny GPT with `MultiTokenPredictionBlock` of megatron-core, on a CPU, in one process.

    python -m tests.harness.megatron_predictions JOBS.json OUT.pt

A list of jobs: `model`, arguments of TransformerConfig and GPTModel; `per_token`; `tokens`, `labels`, `mask`, rows of
numbers. OUT has of each `weights` and `gradients`, by names of megatron-core, `loss`, the main loss, and `means`, of
each depth.
Nothing heavy is imported at the top.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

from tests.harness.megatron_core_program import without_gpu


def main(jobs: list[dict], out: Path) -> None:
    warnings.filterwarnings("ignore")
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        with without_gpu():
            parallel_state.initialize_model_parallel(1, 1)
            torch.save([computed(job) for job in jobs], out)
        torch.distributed.destroy_process_group()


def computed(job: dict) -> dict:
    import torch
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    MTPLossLoggingHelper.tracker.clear()
    model = made(job)
    tokens, labels, mask = (
        torch.tensor(job[name]) for name in ("tokens", "labels", "mask")
    )
    mask = mask.float()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    hidden = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()[None, None]
    total = mask.sum()
    scale = 1 / total if job["per_token"] else torch.tensor(1.0)
    MTPLossAutoScaler.set_loss_scale(scale)
    losses = model(tokens, positions, hidden, labels=labels, loss_mask=mask)
    loss = (losses * mask).sum() / total
    loss.backward()
    return {
        "weights": {name: p.detach() for name, p in model.named_parameters()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "loss": loss.detach(),
        "means": MTPLossLoggingHelper.tracker["values"].clone(),
    }


def made(job: dict):
    """The model, whose norms are not ones."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape = dict(job["model"])
    of_gpt = (
        "share_embeddings_and_output_weights",
        "vocab_size",
        "max_sequence_length",
    )
    gpt = {name: shape.pop(name) for name in of_gpt}
    torch.manual_seed(1234)
    config = TransformerConfig(
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        calculate_per_token_loss=job["per_token"],
        **shape,
    )
    spec = get_gpt_layer_local_spec(normalization=shape["normalization"])
    model = GPTModel(
        config,
        transformer_layer_spec=spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False),
        position_embedding_type="rope",
        **gpt,
    )
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
