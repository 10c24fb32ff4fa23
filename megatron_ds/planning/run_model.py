"""The model of a run, from its configuration: layers not yet built, loss, dtypes, sizes of gradient buckets."""

from collections.abc import Callable
from functools import partial

import torch

from ..config import RunConfig
from ..models import MODELS, Layer, Placement, with_random_ltd
from ..mpu.group import Group
from ..mpu.mesh import Mesh
from ..token_drop import make_token_drop
from .training_length import planned_steps

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}     # by their names in the config


def describe_layers(config: RunConfig, mesh: Mesh, device: torch.device | None = None) -> list[Layer]:
    """The model as a list of named layers, none of them built yet.

    device  of the parameters; None: the mesh's, and with parameters in shards (ZeRO 3) the meta device, so that no rank ever
            holds a whole layer
    """
    dtype = DTYPES[config.optimizer.params_dtype]
    device = device or (torch.device("meta") if config.zero.stage == 3 else mesh.device)
    tp, split, train = mesh.group("tp"), config.parallel.sequence_parallel, config.train
    layers = MODELS[config.model.model](
        config.model, tp=tp, sequence_parallel=split, dtype=dtype, device=device, seed=train.seed,
        recompute_granularity=train.recompute_granularity, recompute_num_layers=train.recompute_num_layers)
    drop = make_token_drop(config)
    return with_random_ltd(layers, drop.blocks, Placement(tp, split, dtype, device, train.seed)) if drop else layers


def last_step(config: RunConfig) -> int:
    """The number of the last step, from 0."""
    return max(0, planned_steps(config) - 1)


def boundary_shape(config: RunConfig) -> tuple[int, int, int]:
    """Shape of the hidden states between stages: [s(/t), b, h]."""
    split = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    return config.model.seq_length // split, config.train.micro_batch_size, config.model.hidden_size


def loss_function(config: RunConfig, tp: Group) -> Callable:
    """loss(what the last layer returns, batch) -> `models.losses.Loss`. Collective over tp."""
    return partial(MODELS[config.model.model].loss, tp=tp, vocab_size=config.model.vocab_size,
                   label_smoothing=config.train.label_smoothing, per_token=config.train.calculate_per_token_loss)


def objective_terms(config: RunConfig) -> tuple[str, ...]:
    """Names of what the model's objective holds beside the tokens' loss."""
    return MODELS[config.model.model].terms(config.model)


def bucket_elements(zero, num_parameters: int) -> int:
    """Elements of one gradient bucket: as asked for, else small enough that most of the reduction hides behind backward.

    zero: a ZeroConfig.  A shard of a bucket is contiguous, so a bucket is also what one all-gather of weights moves.
    """
    reduced = zero.reduce_bucket_size or min(max(num_parameters // 8, 1_000_000), 40_000_000)
    return min(reduced, zero.allgather_bucket_size or reduced)
