"""Write a `torch` checkpoint of Megatron-LM: weights as a release, in mp_rank folders of a layout.

    SAVE/latest_checkpointed_iteration.txt  "release"     SAVE/release/mp_rank_{tp:02d}[_{pp:03d}]/
                                                               model_optim_rng.pt

Names are those of megatron-core's local layers (--transformer-impl local). The weights of one rank are in
memory at a time.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from ....checkpoint.folder import TRACKER
from ....config.options.model import ModelConfig
from ....errors import CheckpointError
from ..family import model_of
from ..files.stored_tensor import WEIGHT, LogicalCheckpoint, in_dtype
from ..formats import Wishes
from ..published import published
from .args import arguments_of
from .folder import RELEASE
from .names import EMBEDDING, HEAD, VOCABULARY, in_layer, layer_of
from .rank_files import WEIGHTS_FILES
from .ranks import split_of


def write_release(
    checkpoint: LogicalCheckpoint, folder: Path, wishes: Wishes
) -> list[str]:
    """Write the weights into the new folder. Returns lines that state what was written.

    Raises CheckpointError for models that Megatron-LM does not have, and for sizes that do not divide.
    """
    # Models and sizes that Megatron-LM lacks are refused before anything is written.
    model = model_of(checkpoint.model, checkpoint.folder)
    tp = wishes.tensor_parallel
    pp = wishes.pipeline_parallel
    _check(checkpoint, model, tp, pp)
    dtype = getattr(torch, wishes.dtype or "float32")
    args = arguments_of(model, tp) | {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "iteration": 0,
        "expert_model_parallel_size": 1,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "world_size": tp * pp,
        "transformer_impl": "local",
        "data_parallel_random_init": False,
        "ckpt_format": "torch",
    }
    # Each rank's file is complete before the next is made, so one part of the model is in memory.
    total = sum(tensor.nbytes for tensor in checkpoint.tensors[WEIGHT].values())
    with published(folder) as hidden:
        for t, p in product(range(tp), range(pp)):
            weights = {
                name: in_dtype(values, dtype, name).clone()
                for name, values in _weights(checkpoint, model, args, (t, tp), (p, pp))
            }
            rank = f"mp_rank_{t:02d}" if pp == 1 else f"mp_rank_{t:02d}_{p:03d}"
            place = hidden / RELEASE / rank
            place.mkdir(parents=True)
            torch.save(
                {
                    "args": argparse.Namespace(**args, rank=t + tp * p),
                    "checkpoint_version": 3.0,
                    "iteration": 0,
                    "model": weights,
                },
                place / WEIGHTS_FILES[0],
            )
            wishes.done(total // (tp * pp))
        (hidden / TRACKER).write_text(RELEASE)
    return [
        f"wrote {folder / RELEASE}: weights for tensor × pipeline = {tp} × {pp} ranks",
        f"to train it in Megatron-LM: --load {folder} --use-checkpoint-args --ckpt-format torch "
        "--transformer-impl local --finetune --no-load-optim --no-load-rng",
    ]


def _check(checkpoint: LogicalCheckpoint, model: ModelConfig, tp: int, pp: int) -> None:
    if checkpoint.optimizer is not None:
        raise CheckpointError(
            f"{checkpoint.folder} has optimizer state, and the torch format is written "
            "with weights alone. Add --no-optim, or write --to torch_dist, which keeps it."
        )
    if any(model.experts):
        raise CheckpointError(
            f"{checkpoint.folder} has experts, which are written --to torch_dist only."
        )
    sizes = {
        "layers": (model.num_layers, pp),
        "query groups": (model.query_groups, tp),
        "columns of the feed-forward": (model.ffn_size, tp),
    }
    for noun, (size, ranks) in sizes.items():
        if size % ranks:
            raise CheckpointError(
                f"{size} {noun} do not divide over {ranks} ranks. Choose another "
                "--target-tensor-parallel-size or --target-pipeline-parallel-size."
            )


def _weights(
    checkpoint: LogicalCheckpoint,
    model: ModelConfig,
    args: dict,
    tensor: tuple[int, int],
    pipeline: tuple[int, int],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, values) of one rank, with its own numbers of layers. tensor, pipeline: its position and size."""
    t, tp = tensor
    p, pp = pipeline
    count = model.num_layers // pp
    for name, stored in checkpoint.tensors[WEIGHT].items():
        # Layers are divided equally; embeddings are on the first stage, the rest, as further depths, on the last.
        layer = layer_of(name)
        local = name
        if layer is not None:
            stage = layer // count
            local = in_layer(name, layer - stage * count)
        elif name.startswith("embedding."):
            stage = 0
        else:
            stage = pp - 1
        names = [local] if stage == p else []
        if name == EMBEDDING and p == pp - 1 > 0:
            # The last stage has copies, of tied weights and for further depths.
            if HEAD not in checkpoint.tensors[WEIGHT]:
                names.append(HEAD)
            if model.mtp_num_layers:
                names.append(EMBEDDING)
        # Only tensors of this stage are read.
        if names:
            values = stored.read()
            if name in VOCABULARY:
                rows = args["padded_vocab_size"] - values.shape[0]
                values = torch.cat((values, values.new_zeros(rows, *values.shape[1:])))
            yield from (
                (one, _shard(values, *split_of(name, args), t, tp)) for one in names
            )


def _shard(
    values: torch.Tensor, dim: int | None, blocks: int, rank: int, size: int
) -> torch.Tensor:
    if dim is None:
        return values
    return torch.cat(
        [block.chunk(size, dim)[rank] for block in values.chunk(blocks, dim)], dim
    )
