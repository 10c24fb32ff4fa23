"""Saving and loading by megatron-core, with what Megatron-LM stores beside tensors; see
megatron_core_program.py.

Nothing heavy is imported at the top.
"""

from pathlib import Path

# Arguments of the model that some models have.
FURTHER = (
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "mscale",
    "mscale_all_dim",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "moe_shared_expert_intermediate_size",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
)


def names_of(chunks) -> list[str]:
    """Keys of the chunks in checkpoints of Megatron-LM."""
    return (
        ["model"]
        if len(chunks) == 1
        else [f"model{number}" for number in range(len(chunks))]
    )


def metadata_of(sharding):
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    named = {"distrib_optim_sharding_type": sharding} if sharding else {}
    return {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": group,
        **named,
    }


def sharded_state(job: dict, chunks, optimizer, sharding, is_loading: bool) -> dict:
    metadata = metadata_of(sharding if job["distributed"] else None) | job.get(
        "metadata", {}
    )
    named = {
        name: chunk.module.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(names_of(chunks), chunks)
    }
    # Megatron-LM passes the same sharded tensors of the model to the optimizer.
    weights = named if len(named) > 1 else named["model"]
    return {
        **named,
        "optimizer": optimizer.sharded_state_dict(
            weights, is_loading=is_loading, metadata=metadata
        ),
    }


def arguments(job: dict):
    """The Namespace that Megatron-LM would store."""
    from argparse import Namespace

    import torch
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    shape, rank = job["model"], torch.distributed.get_rank()
    heads, position = (
        shape["num_attention_heads"],
        shape.get("position_embedding_type", "learned_absolute"),
    )
    groups = shape.get("num_query_groups")
    return Namespace(
        num_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"],
        num_attention_heads=heads,
        ffn_hidden_size=shape["ffn_hidden_size"],
        group_query_attention=groups is not None,
        num_query_groups=groups or 1,
        kv_channels=shape["hidden_size"] // heads,
        seq_length=16,
        max_position_embeddings=shape["max_sequence_length"],
        position_embedding_type=position,
        rotary_base=shape.get("rotary_base", 10000),
        rotary_percent=1.0,
        add_position_embedding=True,
        normalization=shape.get("normalization", "LayerNorm"),
        norm_epsilon=1e-5,
        swiglu=shape.get("swiglu", False),
        add_bias_linear=shape.get("add_bias_linear", True),
        add_qkv_bias=False,
        bias_gelu_fusion=False,
        qk_layernorm=shape.get("qk_layernorm", False),
        squared_relu=False,
        untie_embeddings_and_output_weights=not shape.get(
            "share_embeddings_and_output_weights", False
        ),
        vocab_size=job.get("true_vocab_size"),
        padded_vocab_size=shape["vocab_size"],
        make_vocab_size_divisible_by=128,
        openai_gelu=False,
        onnx_safe=None,
        num_experts=shape.get("num_moe_experts"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=job["tp"],
        pipeline_model_parallel_size=job["pp"],
        expert_model_parallel_size=job["ep"],
        world_size=job["ranks"],
        rank=rank,
        virtual_pipeline_model_parallel_size=job["vp"] if job["vp"] > 1 else None,
        data_parallel_size=job["ranks"] // job["tp"] // job["pp"],
        optimizer="adam",
        lr=job["lr"],
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=job["eps"],
        clip_grad=1.0,
        bf16=job["dtype"] == "bfloat16",
        fp16=False,
        use_distributed_optimizer=job["distributed"],
        ckpt_format="torch_dist",
        consumed_train_samples=8,
        consumed_valid_samples=0,
        iteration=job["steps"],
        model_type=ModelType.encoder_or_decoder,
        attention_backend=AttnBackend.auto,
        transformer_impl="local",
        tokenizer_type="NullTokenizer",
        bert_binary_head=True,
        overlap_grad_reduce=job.get("bucket_size") is not None,
        ddp_bucket_size=job.get("bucket_size"),
        moe_router_topk=shape.get("moe_router_topk", 2),
        moe_layer_freq=shape.get("moe_layer_freq", 1),
        moe_ffn_hidden_size=shape.get("moe_ffn_hidden_size"),
        moe_router_load_balancing_type=shape.get(
            "moe_router_load_balancing_type", "none"
        ),
        **{name: shape[name] for name in FURTHER if name in shape},
    )


def common(job: dict) -> dict:
    return {
        "args": arguments(job),
        "checkpoint_version": 3.0,
        "iteration": job["steps"],
        "num_floating_point_operations_so_far": 0,
        "opt_param_scheduler": {
            "max_lr": job["lr"],
            "num_steps": 8,
            "start_wd": 0.1,
            "end_wd": 0.1,
        },
    }


def save_torch_dist(job: dict, model, optimizer, folder, sharding) -> None:
    import torch
    from megatron.core import dist_checkpointing

    step = Path(folder) / f"iter_{job['steps']:07d}"
    step.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    content = {
        name: value
        for name, value in metadata_of(sharding).items()
        if name != "dp_cp_group"
    }
    state = common(job) | sharded_state(
        job, model, optimizer, sharding, is_loading=False
    )
    dist_checkpointing.save(state, str(step), content_metadata=content)
    torch.distributed.barrier()
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(job["steps"]))


def save_torch(job: dict, model, optimizer, folder, _) -> None:
    import torch
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if job["pp"] > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if job["ep"] > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    place = Path(folder) / f"iter_{job['steps']:07d}" / name
    place.mkdir(parents=True, exist_ok=True)
    first = parallel_state.get_expert_data_parallel_rank() == 0
    weights = {
        name: chunk.module.state_dict_for_save_checkpoint()
        for name, chunk in zip(names_of(model), model)
    }
    state = (
        common(job)
        | weights
        | {
            "optimizer": optimizer.state_dict(),
            "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
        }
    )
    if job["distributed"]:
        optimizer.save_parameter_state(str(place / "distrib_optim.pt"))
    if first:
        torch.save(state, place / "model_optim_rng.pt")
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(job["steps"]))


def load(job: dict, model, optimizer) -> None:
    from megatron.core import dist_checkpointing

    folder, sharding = job["load"]
    step = (Path(folder) / "latest_checkpointed_iteration.txt").read_text()
    path = str(Path(folder) / f"iter_{int(step):07d}")
    state = sharded_state(job, model, optimizer, sharding, is_loading=True)
    accept_states_without_step()
    found = dist_checkpointing.load(state, path)
    for name, chunk in zip(names_of(model), model):
        chunk.module.load_state_dict(found[name])
    optimizer.load_state_dict(found["optimizer"])
    for one in (
        optimizer.chained_optimizers
    ):  # all parameters share one tensor, which each step of
        for state in (
            one.optimizer.state.values()
        ):  # torch's Adam would count up once for each of them
            state["step"] = state["step"].clone()


def accept_states_without_step() -> None:
    """megatron-core's loader of fully_reshardable expects the Adam of TransformerEngine, whose state of a
    parameter has no step. torch's Adam has one, which load_state_dict has set already."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self, param, tensors):
        current = self._get_main_param_and_optimizer_states(param)
        original(
            self,
            param,
            {
                **({"step": current["step"].clone()} if "step" in current else {}),
                **tensors,
            },
        )

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
