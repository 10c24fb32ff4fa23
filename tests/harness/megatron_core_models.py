"""Models and optimizers of megatron-core, and their steps; see megatron_core_program.py.

Nothing heavy is imported at the top.
"""

MICRO_BATCH = 2  # samples


def make(job: dict):
    """([chunk of the model], optimizer)"""
    config, gpt = config_of(job)
    models = chunks_of(job, config, gpt)
    add_noise(models)
    return with_optimizer(job, config, models)


def config_of(job: dict):
    """(TransformerConfig, arguments of the model)"""
    import torch
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    torch.manual_seed(1234)
    dtype = getattr(torch, job["dtype"])
    shape = {
        name: value
        for name, value in job["model"].items()
        if name not in ("bert", "swiglu")
    }
    if job["model"].get("swiglu", False):
        shape |= {
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
        }
    of_gpt = (
        "position_embedding_type",
        "share_embeddings_and_output_weights",
        "vocab_size",
        "max_sequence_length",
        "rotary_base",
    )
    gpt = {name: shape.pop(name) for name in of_gpt if name in shape}
    # Between two stages messages of both directions are matched by their order only, unless they overlap.
    virtual = (
        {
            "virtual_pipeline_model_parallel_size": job["vp"],
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
        if job["vp"] > 1
        else {}
    )
    has_latents = "multi_latent_attention" in shape
    kind = MLATransformerConfig if has_latents else TransformerConfig
    config = kind(
        use_cpu_initialization=True,
        tensor_model_parallel_size=job["tp"],
        params_dtype=dtype,
        expert_model_parallel_size=job["ep"],
        bf16=dtype == torch.bfloat16,
        pipeline_model_parallel_size=job["pp"],
        pipeline_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **virtual,
        **shape,
    )
    return config, gpt


def chunks_of(job: dict, config, gpt: dict) -> list:
    """The chunks of the model on this pipeline rank."""
    from megatron.core import parallel_state
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt.gpt_model import GPTModel

    if job["model"].get("bert", False):
        kind = BertModel
        spec = bert_layer_local_spec
        gpt = {**gpt, "num_tokentypes": 2}
    else:
        kind = GPTModel
        spec = gpt_spec(job["model"], config)
        if "multi_latent_attention" in job["model"]:
            spec = with_plain_cores(spec)
    stages = [
        dict(ignore_virtual=False, vp_stage=number) for number in range(job["vp"])
    ]
    return [
        kind(
            config,
            transformer_layer_spec=spec,
            **gpt,
            **depths(config, spec, stage["vp_stage"] if job["vp"] > 1 else None),
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            vp_stage=stage["vp_stage"] if job["vp"] > 1 else None,
        )
        for stage in stages
    ]


def gpt_spec(shape: dict, config):
    """The modules of a GPT's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )

    if isinstance(shape.get("moe_layer_freq"), list):
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=False,
            normalization=shape.get("normalization"),
        )
    return get_gpt_layer_local_spec(
        shape.get("num_moe_experts"),
        shape.get("moe_grouped_gemm", False),
        shape.get("qk_layernorm", False),
        shape.get("multi_latent_attention", False),
        normalization=shape.get("normalization"),
    )


def with_plain_cores(spec):
    """The modules of layers, whose attention has values of another width than keys."""
    from megatron.core.transformer import multi_latent_attention

    from tests.harness.megatron_latent import plain_core

    multi_latent_attention.HAVE_TE = False
    core = plain_core()
    for layer in getattr(spec, "layer_specs", None) or [spec]:
        layer.submodules.self_attention.submodules.core_attention = core
    return spec


def depths(config, spec, stage) -> dict:
    """Arguments of the model with the depths of multi-token prediction of a chunk."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    if not getattr(config, "mtp_num_layers", None):
        return {}
    made = get_gpt_mtp_block_spec(config, spec, False, vp_stage=stage)
    return {"mtp_block_spec": made}


def add_noise(models: list) -> None:
    """CPU initialization leaves biases zero and norms one."""
    import torch

    with torch.no_grad():
        torch.manual_seed(77)
        for p in (p for model in models for p in model.parameters()):
            if p.dim() == 1 and not getattr(p, "tensor_model_parallel", False):
                p.add_(0.1 * torch.randn_like(p))


def with_optimizer(job: dict, config, models: list):
    """([chunk in DistributedDataParallel], optimizer)"""
    import torch
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dtype = getattr(torch, job["dtype"])
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=job["distributed"],
        grad_reduce_in_fp32=True,
        bucket_size=job.get("bucket_size"),
    )
    wrapped = [
        DistributedDataParallel(
            config,
            ddp,
            model.to(dtype),
            disable_bucketing=number > 0 or job.get("bucket_size") is None,
        )
        for number, model in enumerate(models)
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=job["lr"],
            min_lr=job["lr"],
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=job["eps"],
            clip_grad=1.0,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=job["distributed"],
        ),
        wrapped,
    )
    for (
        group
    ) in optimizer.param_groups:  # Megatron-LM's scheduler does this before each step
        group["weight_decay"] = 0.1 * group["wd_mult"]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped, optimizer


# ---- Steps.


def train_step(chunks: list, optimizer, batch: dict) -> list[dict]:
    """Terms of the loss of each micro-batch before the step; [] except on the last stage.

    batch: {name: tensor [samples, ..]} of all data-parallel ranks
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    mine = share_of(batch)
    samples, length = mine["tokens"].shape
    count = samples // MICRO_BATCH
    parts = [
        {
            name: tensor[i * MICRO_BATCH : (i + 1) * MICRO_BATCH]
            for name, tensor in mine.items()
        }
        for i in range(count)
    ]
    terms = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(parts) for _ in chunks],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=count,
        seq_length=length,
        micro_batch_size=MICRO_BATCH,
    )
    optimizer.step()
    return terms


def share_of(batch: dict) -> dict:
    """The samples of this data-parallel rank."""
    from megatron.core import parallel_state

    rank, size = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
    )
    return {
        name: tensor.chunk(size)[rank].contiguous() for name, tensor in batch.items()
    }


def forward_step(samples, model):
    """Return (output, its loss function), as the function of Megatron-LM's pretraining scripts does."""
    batch = next(samples)
    if "order" not in batch:
        output = model(
            batch["tokens"], positions_of(batch), None, labels=batch["labels"]
        )
        return output, lambda losses: terms_of({"loss": losses.float().mean()})
    output = model(
        batch["tokens"], batch["padding"], batch["types"], lm_labels=batch["labels"]
    )
    return output, lambda output: bert_terms(*output, batch)


def positions_of(batch: dict):
    import torch

    return (
        torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"]).contiguous()
    )


def bert_terms(losses, order, batch: dict):
    """Losses of the masked tokens [b, s], and of the order of segments, of logits [b, 2]."""
    import torch

    mask = batch["mask"].float()
    return terms_of(
        {
            "loss": (losses.float() * mask).sum() / mask.sum(),
            "order": torch.nn.functional.cross_entropy(order.float(), batch["order"]),
        }
    )


def terms_of(terms: dict):
    """(their sum, what the schedule collects)"""
    return sum(terms.values()), {name: float(value) for name, value in terms.items()}


def logits_of(model, batch: dict) -> list:
    """[logits [b, s, vocabulary]], of a BERT also of the order of segments [b, 2], of this rank's samples."""
    import torch

    mine = share_of(batch)
    with torch.no_grad():
        if "order" in mine:
            return [
                x.float() for x in model(mine["tokens"], mine["padding"], mine["types"])
            ]
        return [model(mine["tokens"], positions_of(mine), None).float()]
