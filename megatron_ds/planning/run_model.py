"""The model of a run, from its configuration: context, layers not yet built, loss, dtypes and message shapes."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ..batch.batch import Batch
from ..config import RunConfig
from ..data.kind import DataKind
from ..features import layer_changes
from ..models import MODELS, Layer
from ..mpu.context import ParallelContext, Recompute, SequenceSlice
from ..mpu.mesh import Mesh
from .training_length import planned_steps

# dtypes by their names in the configuration.
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def parallel_context(config: RunConfig, mesh: Mesh) -> ParallelContext:
    """Return what the layers of a run need in addition to the sizes of the model. Collective over the world."""
    train = config.train
    dtype = DTYPES[config.optimizer.params_dtype]
    parallel = config.parallel
    ctx = ParallelContext(
        mesh,
        parallel.sequence_parallel,
        dtype,
        mesh.device,
        train.seed,
        Recompute(
            train.recompute_granularity,
            train.recompute_num_layers,
            train.checkpoint_in_cpu,
            train.distribute_saved_activations,
        ),
        train.cross_entropy_chunks,
        config.is_zigzag,
        parallel.cp_comm_type,
        parallel.hierarchical_context_parallel_sizes[0],
        train.tiled_mlp,
    )
    # Layers of some pipeline stages alone may ask for these groups, so all ranks connect them here.
    _ = ctx.sequence_ranks
    if "a2a+p2p" in parallel.cp_comm_type:
        _ = ctx.split_cp
    return ctx


def describe_layers(
    config: RunConfig, mesh: Mesh, device: torch.device | None = None
) -> list[Layer]:
    """Return the model as a list of named layers, not built.

    device  of the parameters. None: the mesh's device. The meta device with ZeRO 3, and where frozen weights are
            encoded: a rank holds shards or codes only and must never hold the whole model
    """
    ctx = parallel_context(config, mesh)
    if device is None:
        added = config.added_weights
        is_late = config.zero.stage == 3 or added is not None and added.frozen_bits
        device = torch.device("meta") if is_late else mesh.device
    return model_layers(config, replace(ctx, device=device))


def model_layers(config: RunConfig, ctx: ParallelContext) -> list[Layer]:
    """Return the layers of a run, not built, with what features make of them."""
    layers = MODELS[config.model.model](config.model, ctx)
    for change in layer_changes(config):
        layers = change(layers, config, ctx)
    return layers


def sequence_slice(config: RunConfig) -> SequenceSlice:
    """Return the slice of the first rank. Plans use it for all ranks, as all slices have the same length."""
    p = config.parallel
    return SequenceSlice.of(
        tp=(0, p.tensor_model_parallel_size),
        sequence_parallel=p.sequence_parallel,
        cp=(0, p.context_parallel_size),
        zigzag=config.is_zigzag,
    )


def boundary_shape(config: RunConfig) -> tuple[int, int, int]:
    """Shape of the hidden states between stages, of a full micro-batch: [s(/t), b, h]."""
    part = sequence_slice(config)
    return part.hidden_shape(
        part.batch_length(config.model.seq_length),
        config.train.micro_batch_size,
        config.model.hidden_size,
    )


def blank_batch(
    config: RunConfig,
    part: SequenceSlice,
    device: torch.device | str,
    step: int | None = None,
) -> Batch:
    """Return a full micro-batch without values, for plans and timings. step: by which blocks keep tokens, if any."""
    blank = data_kind(config).blank
    batch = blank(config.train.micro_batch_size, config.model.seq_length, device)
    if step is not None:
        batch = batch.keeping(config.kept_tokens, step)
    return batch.cut(part)


def planned_batch(config: RunConfig, device: torch.device) -> Batch:
    """Return the micro-batch of plans: of the first rank, in the last step."""
    batch = blank_batch(config, sequence_slice(config), device, last_step(config))
    if config.data.reset_attention_mask or config.data.pack_documents:
        return replace(batch, document_ids=torch.zeros_like(batch.tokens))
    return batch


def last_step(config: RunConfig) -> int:
    """Return the number of the last step, from 0."""
    return max(0, planned_steps(config) - 1)


def data_kind(config: RunConfig) -> DataKind:
    """Return the kind of the data of a run: that of the model, or what an objective of a wing makes of it."""
    own = MODELS[config.model.model].data
    objective = config.objective
    if objective is None or objective.data is None:
        return own
    return objective.data(own, config)


def loss_function(config: RunConfig, mesh: Mesh) -> Callable:
    """Return the loss of a run: (output of the last layer, batch) → `models.Loss`. Calls are collective over tp.

    It is the model's, or that of an objective of a wing; that of pairs of answers is collective over cp, too.
    """
    if config.objective is not None:
        return config.objective.loss(config, mesh)
    return partial(
        MODELS[config.model.model].loss,
        tp=mesh.group("tp"),
        vocab_size=config.model.vocab_size,
        label_smoothing=config.train.label_smoothing,
        per_token=config.train.calculate_per_token_loss,
    )
