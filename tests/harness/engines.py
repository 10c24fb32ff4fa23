"""Engines of small jobs on ranks as threads: trained for some steps, saved, and loaded under another layout."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from megatron_ds.checkpoint.load import load
from megatron_ds.checkpoint.save import save
from megatron_ds.config import RunConfig, parse
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.progress.ramps import Progress
from megatron_ds.training.build import Replica, build_replica
from megatron_ds.training.step import StepOutcome, train_step
from tests.harness.layout_comparison import (
    global_batch_share,
    parse_layout,
    random_samples,
)
from tests.harness.threads import run_ranks
from tests.harness.tiny_jobs import SEQ_LENGTH, VOCAB

BATCH = 4


def config_of(job: Iterable[str], layout: str, rules=()) -> RunConfig:
    """The config of a job under a layout (layout_comparison.py), with one sample in a micro-batch."""
    request = parse_layout(layout, mbs="1")
    return parse([*job, *request.flags], world_size=request.world_size, rules=rules)


def on_engines(
    config: RunConfig, main: Callable[[Replica], object], shares_memory: bool = False
) -> list:
    """main(replica) on every rank; the results in rank order."""
    grid = config.grid()

    def of_rank(rank, world):
        return main(build_replica(config, Mesh(grid, rank, world.connect)))

    return run_ranks(config.world_size, of_rank, shares_memory)


def outcomes(
    replica: Replica, steps: Iterable[int], learning_rate: float
) -> list[StepOutcome]:
    """Train the steps of these numbers on random samples, which begin again after 16. Collective."""
    samples = random_samples(16, SEQ_LENGTH, VOCAB, seed=1)
    size = replica.config.train.global_batch_size
    return [
        train_step(
            replica,
            global_batch_share(
                samples, step * size, size, replica.config, replica.mesh
            ),
            Progress(step=step),
            learning_rate=learning_rate,
            weight_decay=0.1,
        )
        for step in steps
    ]


def train(replica: Replica, steps: Iterable[int], learning_rate=1e-2) -> list[float]:
    """The losses of `outcomes`."""
    return [outcome.loss for outcome in outcomes(replica, steps, learning_rate)]


def save_state(replica: Replica, folder: Path, step: int) -> dict[str, float]:
    """Write the state of the optimizer; the numbers that `load_state` needs besides. Collective."""
    pieces = list(replica.optimizer.pieces(saving=True))
    save(folder, step, pieces, run={}, **_places(replica))
    return replica.optimizer.extra_state()


def load_state(
    replica: Replica, folder: Path, step: int, numbers: Mapping[str, float]
) -> None:
    """Continue from what `save_state` wrote. Collective."""
    load(
        folder, step, list(replica.optimizer.pieces(saved=numbers)), **_places(replica)
    )
    replica.optimizer.load_extra_state(numbers)
    replica.optimizer.after_load()


def _places(replica: Replica) -> dict:
    return {
        "coordinates": replica.mesh.coordinates,
        "world": replica.mesh.group("world"),
    }
