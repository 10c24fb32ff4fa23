"""Write a `torch_dist` checkpoint that Megatron-LM and megatron-core load at any layout.

    SAVE/latest_checkpointed_iteration.txt    SAVE/iter_0000123/{.metadata, __0_*.distcp, common.pt,
                                                                 metadata.json}

Keys are those of TransformerEngine's layers, as megatron-core writes them whatever it trains; layers that are
all alike are stacked. Optimizer state has the kind `fully_reshardable` of the distributed optimizer. The
arguments are a Namespace that --use-checkpoint-args reads.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ....checkpoint.folder import TRACKER, name_of
from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from ..family import model_of
from ..files.read_ahead import ReadAhead
from ..files.stored_tensor import WEIGHT, LogicalCheckpoint, StoredTensor
from ..files.torch_dist_folder import COMMON_FILE, METADATA_FILE
from ..formats import Wishes
from ..published import published
from ..run_values import updates_in
from .args import arguments_of
from .dcp_folder import DcpChunk, write_dcp_folder
from .model import CHOICES, MOMENTS, TRAINING, UNTRAINED
from .names import VOCABULARY
from .written_names import BLOCK, DEPTH, leaves_of, states_of

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
DEFAULTS = {
    "lr": 1e-4,
    "min_lr": 0.0,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
}
STATE_KEYS = {
    WEIGHT: "optimizer.state.param.",
    **{kind: f"optimizer.state.{kind}." for kind in MOMENTS},
}
# The schedule in the files is constant: the flags of the run decide it.
OF_STATE = ("--use-distributed-optimizer", "--override-opt_param-scheduler")


def write(checkpoint: LogicalCheckpoint, folder: Path, wishes: Wishes) -> list[str]:
    """Write the checkpoint into the new folder. Returns lines that state what was written.

    Raises CheckpointError for models and states that Megatron-LM does not have.
    """
    # Models and states that Megatron-LM lacks are refused before anything is written.
    model = model_of(checkpoint.model, checkpoint.folder)
    with_state = checkpoint.optimizer is not None and not wishes.weights_only
    _check(checkpoint, model, with_state)
    dtype = getattr(torch, wishes.dtype or "float32")
    step = checkpoint.progress.iteration or 0
    args = arguments_of(model, wishes.tensor_parallel) | _training(
        checkpoint, wishes, dtype
    )
    # Readers see the folder only when it is complete.
    with published(folder) as hidden:
        path = hidden / name_of(step)
        path.mkdir()
        pairs = list(_chunks(checkpoint, model, args, dtype, with_state))
        _write_tensors(path, pairs, states_of(model), wishes)
        # The common values and the description of the format complete the folder.
        torch.save(_common(checkpoint, args, with_state), path / COMMON_FILE)
        (path / METADATA_FILE).write_text(json.dumps(FORMAT))
        (hidden / TRACKER).write_text(str(step))
    path = folder / name_of(step)
    return _report(folder, path, model, args, wishes, with_state)


def _write_tensors(
    path: Path,
    pairs: Sequence[tuple[DcpChunk, int]],
    objects: Mapping[str, object],
    wishes: Wishes,
) -> None:
    """Write the chunks; tensors are read ahead while earlier ones are written. pairs: as of `_chunks`"""
    chunks = [chunk for chunk, _ in pairs]
    sources = [
        StoredTensor(chunk.sizes, chunk.dtype, chunk.read, chunk.key)
        for chunk in chunks
    ]

    def take(index: int) -> torch.Tensor:
        wishes.done(pairs[index][1])
        return ahead.take(index)

    with ReadAhead(sources, [chunk.dtype for chunk in chunks]) as ahead:
        taken = (
            replace(chunk, read=partial(take, index))
            for index, chunk in enumerate(chunks)
        )
        write_dcp_folder(path, taken, objects, wishes.shard_bytes)


def _report(
    folder: Path,
    path: Path,
    model: ModelConfig,
    args: Mapping[str, Any],
    wishes: Wishes,
    with_state: bool,
) -> list[str]:
    """Return the lines that state what was written to `path` and how Megatron-LM loads it."""
    flags = [
        "--load",
        str(folder),
        "--use-checkpoint-args",
        "--ckpt-format",
        "torch_dist",
        "--no-load-rng",
        *(OF_STATE if with_state else ("--no-load-optim",)),
    ]
    if model.activation == "gelu_exact":
        # The fused kernel computes the tanh approximation.
        flags.append("--no-bias-gelu-fusion")
    kept = "weights and state of Adam" if with_state else "weights only"
    if with_state and any(model.experts):
        flags += ["--expert-model-parallel-size", str(wishes.expert_parallel)]
    lines = [
        f"wrote {path}: {kept}",
        f"to train it in Megatron-LM: {' '.join(flags)}",
    ]
    if with_state and any(model.experts):
        lines.append(
            "its optimizer state loads with --expert-model-parallel-size "
            f"{'above 1' if wishes.expert_parallel > 1 else '1'}; for another, convert with "
            "--target-expert-parallel-size"
        )
    if args["padded_vocab_size"] > model.vocab_size:
        lines.append(
            f"{args['padded_vocab_size'] - model.vocab_size} rows of zeros pad the vocabulary. In "
            "Megatron-LM they take part in the softmax, so its loss is higher than here"
        )
    if (factor := args.get("moe_expert_capacity_factor")) and (
        (model.moe_capacity_scope, model.moe_eval_capacity_factor)
        != ("micro-batch", factor)
    ):
        lines.append(
            f"Megatron-LM applies the capacity factor {factor} to all tokens of a micro-batch on a "
            "rank, in evaluation too. Here the run had --moe-capacity-scope "
            f"{model.moe_capacity_scope} and --moe-eval-capacity-factor "
            f"{model.moe_eval_capacity_factor}, so other tokens are dropped there"
        )
    return lines


def _check(checkpoint: LogicalCheckpoint, model: ModelConfig, with_state: bool) -> None:
    if with_state and checkpoint.optimizer not in ("adam", "adamw"):
        raise CheckpointError(
            f"{checkpoint.folder} has the state of --optimizer {checkpoint.optimizer}, and "
            "Megatron-LM's is written for Adam only. Write the weights: --no-optim."
        )
    if any(model.experts) and (
        model.mlp_type != "standard" or len(set(model.experts) - {0}) > 1
    ):
        raise CheckpointError(
            f"{checkpoint.folder}: Megatron-LM has no residual experts and no layers with "
            "different numbers of experts."
        )


def _training(
    checkpoint: LogicalCheckpoint, wishes: Wishes, dtype: torch.dtype
) -> dict[str, Any]:
    # Training options keep their values, or take Megatron-LM's defaults.
    values = {
        name: checkpoint.training.get(path, DEFAULTS.get(name))
        for path, name in TRAINING.items()
    }
    progress = checkpoint.progress
    # The remaining arguments describe the run and the layout it will load with.
    return values | {
        "optimizer": "adam",
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "iteration": progress.iteration or 0,
        "consumed_train_samples": progress.samples or 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": True,
        "tensor_model_parallel_size": wishes.tensor_parallel,
        "pipeline_model_parallel_size": wishes.pipeline_parallel,
        "expert_model_parallel_size": wishes.expert_parallel,
        "data_parallel_random_init": False,
        "tokenizer_type": None,
        "transformer_impl": "transformer_engine",
        "world_size": 1,
        "rank": 0,
        "data_parallel_size": 1,
        "overlap_grad_reduce": False,
    }


def _common(
    checkpoint: LogicalCheckpoint, args: Mapping[str, Any], with_state: bool
) -> dict[str, Any]:
    # Weights alone need the arguments and the version.
    step = checkpoint.progress.iteration or 0
    content: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    common = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": step,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }
    if not with_state:
        return common
    # Megatron-LM stores the optimizer's parameter groups in this file, and its tensors in others.
    content["distrib_optim_sharding_type"] = "fully_reshardable"
    state: Any = _optimizer(checkpoint, args, is_of_experts=False)
    # With expert parallelism Megatron-LM has an optimizer for the experts alone.
    if args["expert_model_parallel_size"] > 1:
        state = {0: state, 1: _optimizer(checkpoint, args, is_of_experts=True)}
    # The scheduler is stored as a constant rate, at the number of samples that were trained.
    samples = checkpoint.progress.samples or 0
    scheduler = {
        "max_lr": args["lr"],
        "min_lr": args["min_lr"],
        "num_steps": samples,
        "lr_warmup_steps": 0,
        "lr_decay_style": "constant",
        "lr_decay_steps": max(samples, 1),
        "start_wd": args["weight_decay"],
        "end_wd": args["weight_decay"],
        "wd_incr_style": "constant",
        "wd_incr_steps": max(samples, 1),
    }
    return common | {"optimizer": state, "opt_param_scheduler": scheduler}


def _optimizer(
    checkpoint: LogicalCheckpoint, args: Mapping[str, Any], is_of_experts: bool
) -> dict[str, Any]:
    """Return the state of one optimizer but its tensors. Biases and norms, with wd_mult 0, have a group."""
    factors = (1.0, 0.0) if not is_of_experts or args["add_bias_linear"] else (1.0,)
    groups = [_group(checkpoint, args, wd_mult, is_of_experts) for wd_mult in factors]
    state: dict[str, Any] = {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": "fully_reshardable",
    }
    if scaler := checkpoint.progress.scaler:
        state["grad_scaler"] = {
            "scale": torch.tensor([float(scaler["loss_scale"])]),
            "growth_tracker": int(
                scaler["loss_scale_iteration"] - scaler["loss_scale_last_overflow"] - 1
            ),
            "hysteresis_tracker": int(scaler["loss_scale_lives"]),
        }
    return state


def _group(
    checkpoint: LogicalCheckpoint,
    args: Mapping[str, Any],
    wd_mult: float,
    is_of_experts: bool,
) -> dict[str, Any]:
    """Return a parameter group as torch's Adam has it, with Megatron's factors."""
    return {
        "wd_mult": wd_mult,
        "lr_mult": 1.0,
        "is_expert_parallel": is_of_experts,
        "is_decoupled_lr": False,
        "max_lr": args["lr"],
        "min_lr": args["min_lr"],
        "lr": args["lr"],
        "betas": (args["adam_beta1"], args["adam_beta2"]),
        "eps": args["adam_eps"],
        "weight_decay": args["weight_decay"] * wd_mult,
        "step": updates_in(checkpoint.progress),
        **{name: checkpoint.training.get(path, True) for path, name in CHOICES.items()},
    }


def _chunks(
    checkpoint: LogicalCheckpoint,
    model: ModelConfig,
    args: dict[str, Any],
    dtype: torch.dtype,
    with_state: bool,
) -> Iterator[tuple[DcpChunk, int]]:
    """Yield the chunks, each with the number of the source's bytes that it has converted: weights, then masters
    and moments under the keys of the optimizer. A weight that is also a master counts once."""
    if any(model.experts) and len(set(model.experts)) == 1:
        args["moe_layer_freq"] = 1
    rows = args["padded_vocab_size"]
    # Masters have the names of the weights below another key.
    kinds = [("", WEIGHT, dtype)]
    if with_state:
        kinds += [
            (STATE_KEYS[kind], kind, torch.float32) for kind in (WEIGHT, *MOMENTS)
        ]
    for prefix, kind, wanted in kinds:
        for name, tensor in checkpoint.tensors[kind].items():
            # Megatron-LM keeps biases of routers in fp32, without state of the optimizer.
            is_untrained = name.endswith(UNTRAINED)
            if prefix and is_untrained:
                continue
            kept = torch.float32 if is_untrained else wanted
            counted = tensor.nbytes if kind != WEIGHT or not prefix else 0
            for chunk in _chunks_of(prefix, name, tensor, kept, (model, rows)):
                yield chunk, counted
                counted = 0


def _chunks_of(
    prefix: str,
    name: str,
    tensor: StoredTensor,
    dtype: torch.dtype,
    about: tuple[ModelConfig, int],
) -> Iterator[DcpChunk]:
    """Yield a tensor under each of its keys. about: the model, and the rows of its vocabulary with padding"""
    model, rows = about
    # The vocabulary is padded to the rows that the arguments state.
    shape = tensor.shape
    read = tensor.read
    if name in VOCABULARY and shape[0] < rows:
        shape = (rows, *shape[1:])
        read = partial(_padded, tensor, rows)
    first = (0,) * len(shape)
    # Layers of one kind are slices of a tensor over all layers; others are tensors of their own.
    block = BLOCK.fullmatch(name)
    depth = DEPTH.fullmatch(name)
    if block is not None and len(set(model.experts)) <= 1:
        layer = int(block["layer"])
        for leaf in leaves_of(block["leaf"], model, any(model.experts)):
            yield DcpChunk(
                f"{prefix}{block['layers']}.{leaf}",
                (model.num_layers, *shape),
                dtype,
                (layer, *first),
                (1, *shape),
                lambda: read()[None],
            )
        return
    keys = [name]
    if block is not None:
        layer = int(block["layer"])
        leaves = leaves_of(block["leaf"], model, bool(model.experts[layer]))
        keys = [f"{block['layers']}.{layer}.{leaf}" for leaf in leaves]
    elif depth is not None:
        leaves = leaves_of(depth["leaf"], model, bool(model.experts[-1]))
        keys = [f"{depth['block']}.{leaf}" for leaf in leaves]
    for key in keys:
        yield DcpChunk(prefix + key, shape, dtype, first, shape, read)


def _padded(tensor: StoredTensor, rows: int) -> torch.Tensor:
    values = tensor.read()
    return torch.cat(
        (values, values.new_zeros(rows - values.shape[0], *values.shape[1:]))
    )
