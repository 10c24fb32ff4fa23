"""Training steps of ours from a checkpoint of another program, to be compared with that program's."""

import torch

from megatron_ds.compat.conversion.foreign_start import load_foreign
from megatron_ds.config import parse
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.run_checkpoint import all_pieces
from tests.harness.layout_comparison import Trace, merge, parse_layout, train_layout
from tests.harness.threads import run_ranks

SPELLINGS = {
    ("activation", "swiglu"): "--swiglu",
    ("add_bias_linear", False): "--disable-bias-linear",
}


def flags_of(options: dict) -> list[str]:
    """Options as flags of a run on mock data: 10 steps of 4 samples at a constant learning rate."""
    flags = (
        "--mock-data --tokenizer-type NullTokenizer --lr-decay-style constant --train-iters 10 "
        "--global-batch-size 4"
    ).split()
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if spelling := SPELLINGS.get((name, value)):
            flags.append(spelling)
        elif isinstance(value, tuple):
            flags += [flag, *map(str, value)]
        elif isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, str(value)]
    return flags


def next_step(
    found, batch, layout: str, steps: int = 1, **options
) -> tuple[Trace, dict[str, torch.Tensor]]:
    """(trace, logical weights) of steps on the samples, in micro-batches of 2, from the state that was read.

    batch    4 samples for each step
    options  of the run; those of the model come from the checkpoint where they are not given
    """
    request = parse_layout(layout, mbs="2")
    config = parse(
        [*flags_of(found.model | options), *request.flags],
        world_size=request.world_size,
    )
    grid = config.grid(request.world_size)

    def rank_trains(rank, world):
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        return train_layout(
            config,
            mesh,
            steps,
            batch,
            watch=lambda engine: load_foreign(
                engine, found, all_pieces(engine), engine.config.checkpoint
            ),
        )

    return merge(run_ranks(request.world_size, rank_trains))


def difference(ours: dict, theirs: dict) -> float:
    """The largest of any element."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - theirs[name].float()).abs().max()) for name in theirs
    )
