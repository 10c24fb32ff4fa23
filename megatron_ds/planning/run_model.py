"""The model of a run, from its configuration: layers not yet built, loss, dtypes, sizes of gradient buckets."""

from collections.abc import Callable
from functools import partial

import torch

from ..config import RunConfig
from ..config.training_schedule import make_token_drop
from ..models import MODELS, Placement, with_random_ltd
from ..mpu.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}     # by their names in the config


def describe_layers(config: RunConfig, mesh: Mesh) -> list:
    """The model as a list of named layers, none of them built yet.

    With parameters in shards the layers are built without memory (on the meta device): no rank ever holds the whole.
    """
    dtype = DTYPES[config.optimizer.params_dtype]
    device = torch.device("meta") if config.zero.stage == 3 else mesh.device
    tp, split, train = mesh.group("tp"), config.parallel.sequence_parallel, config.train
    layers = MODELS[config.model.model](
        config.model, tp=tp, sequence_parallel=split, dtype=dtype, device=device, seed=train.seed,
        recompute_granularity=train.recompute_granularity, recompute_num_layers=train.recompute_num_layers)
    drop = make_token_drop(config)
    return with_random_ltd(layers, drop.blocks, Placement(tp, split, dtype, device, train.seed)) if drop else layers


def loss_function(config: RunConfig, tp) -> Callable:
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
