"""Train the job of tools/compare_layouts.py on threaded ranks, and observe that its options are in force.

`Seen` is what a rank's engine shows while it trains: shapes that layers receive, how many micro-batches are
alive, bytes of optimizer state. None of it is read from the configuration.
"""

import functools
import os
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.data.loading.loader import Loader
from megatron_ds.data.samples.packing import PackedDataset
from megatron_ds.extensions.fim.fill_in_middle import FillInMiddle
from megatron_ds.extensions.joined_blocks.joined_block import AfterAttention
from megatron_ds.models.attention import CoreAttention
from megatron_ds.models.block import MLP, Block, in_parallel
from megatron_ds.models.context_attention import SharedKeysAttention
from megatron_ds.mpu.group import Traffic
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.tensor_parallel.logits_in_chunks import LogitsInChunks
from megatron_ds.training.run_checkpoint import all_pieces
from megatron_ds.zero.layout import ALIGN
from tests.harness.late_messages import LateNetwork
from tests.harness.layout_comparison import (
    difference,
    merge,
    mock_samples,
    parse_layout,
    train_layout,
)
from tests.harness.threads import run_ranks

GLOBAL_BATCH, NUM_LAYERS = 4, 3  # three layers are two stages that differ
JOB_STEPS = 20  # of the job: its rates warm up and decay over them
# Of the job, that are run: its beginning, and with `make test-all` the whole of it.
STEPS = JOB_STEPS if os.environ.get("MEGATRON_DS_TEST_ALL") else 3


@dataclass
class Seen:
    """One rank of a run."""

    layers: list[str]  # names of the parameters here, without the last word
    saved: set[str]  # names of the weights in a checkpoint
    dtypes: set[torch.dtype]
    qkv_rows: set[int]  # of the projections' local weights
    dense_elements: int
    expert_elements: int
    dense_trained: int  # of the elements, those that are not frozen
    expert_trained: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    master_bytes: int
    places: set[str]  # where state is: "device", "cpu", "nvme"
    stages: tuple[int, ...]  # of the pipeline
    traffic: Traffic  # grows while the rank trains
    parallel: set[bool] = field(
        default_factory=set
    )  # blocks whose halves read the same input
    block_inputs: set[tuple] = field(default_factory=set)
    most_documents: int = 0  # of a sample, that attention keeps apart
    restarts: int = 0  # positions that are not above those before them
    forwards: int = 0
    weight_halves: int = 0  # of split backwards
    peak_alive: int = 0

    def see_block(self, x, batch) -> None:
        self.block_inputs.add(tuple(x.shape))
        if batch.documents is not None:
            self.most_documents = max(
                self.most_documents, int(batch.documents.ids.max()) + 1
            )
        # where tokens are dropped some are left out
        self.restarts += int((batch.position_ids.diff(dim=1) < 1).sum())


@dataclass
class Run:
    """merged: (trace, logical weights).

    calls: the names of layers that ran, over all ranks, one for each time.
    """

    merged: tuple
    seen: list[Seen]
    calls: list[str]
    model: object


def run_layout(
    job: list[str],
    layout: str,
    steps: int = STEPS,
    transport: Callable | None = None,
) -> Run:
    """Train a layout on threads.

    job        flags of the model
    layout     as compare_layouts.py takes it
    transport  as `run_ranks` takes it; None: half of the layouts run as on one host, where gathered weights are
               mapped, the others as on several, where messages arrive late
    """
    request = parse_layout(layout, mbs="1")
    config = parse([*job, *request.flags], world_size=request.world_size)
    grid = config.grid(request.world_size)
    samples = mock_samples(config, 4 * GLOBAL_BATCH, seed=1)
    seen: dict[int, Seen] = {}

    def main(rank, world):
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        return train_layout(
            config,
            mesh,
            steps,
            samples,
            watch=lambda engine: seen.__setitem__(rank, look_at(engine)),
        )

    with counted_calls() as calls:
        shares_memory = transport is None and zlib.crc32(layout.encode()) % 2 == 1
        network = LateNetwork()
        if transport is None and not shares_memory:
            transport = network.transport
        traces = run_ranks(request.world_size, main, shares_memory, transport)
        assert not network.unfinished()
    return Run(
        merge(traces),
        [seen[rank] for rank in range(request.world_size)],
        calls,
        config.model,
    )


@functools.cache
def _reference(job: tuple[str, ...], layout: str, steps: int) -> Run:
    return run_layout(list(job), layout, steps)


def reference_of(job: list[str], layout: str, steps: int = STEPS) -> Run:
    """The run of one process that a layout is compared with; each is run once."""
    return _reference(tuple(job), parse_layout(layout, mbs="1").reference, steps)


def stray(job: list[str], layout: str, steps: int = STEPS):
    """(largest differences to one process, the run)."""
    run, reference = run_layout(job, layout, steps), reference_of(job, layout, steps)
    return difference(run.merged, reference.merged, run.model), run


def _elements(parameters) -> tuple[int, int]:
    """(those of experts excepted, those of experts) of this rank, with the padding of each parameter's place."""
    counts = [0, 0]
    for p in parameters:
        places = -(-p.numel() // ALIGN)
        counts[".mlp.experts." in p.spec.name] += places * ALIGN
    return tuple(counts)


def _projected_rows(attention) -> int:
    """Rows of this rank, of the weight that leads to the heads."""
    names = ("linear_qkv", "linear_kv_up_proj", "in_proj")
    found = (getattr(m, name, None) for m in attention.modules() for name in names)
    return next(len(linear.weight) for linear in found if linear is not None)


def look_at(engine) -> Seen:
    """What is there to see now, and hooks for what is to be seen during training."""
    memory = engine.optimizer.memory()
    blocks = [
        module for module in engine.modules.modules() if isinstance(module, Block)
    ]
    dense, experts = _elements(engine.parameters)
    trained = _elements(p for p in engine.parameters if p.requires_grad)
    seen = Seen(
        layers=[p.spec.name.rpartition(".")[0] for p in engine.parameters],
        saved={p.spec.name for p in all_pieces(engine) if p.kind == "weight"},
        dtypes={p.dtype for p in engine.parameters},
        qkv_rows={_projected_rows(block.self_attention) for block in blocks},
        dense_elements=dense,
        expert_elements=experts,
        dense_trained=trained[0],
        expert_trained=trained[1],
        parameter_bytes=memory.parameters,
        gradient_bytes=memory.gradients,
        optimizer_bytes=memory.optimizer,
        master_bytes=memory.masters,
        places=set(engine.optimizer.memory_by_place()),
        stages=tuple(engine.stages),
        traffic=engine.mesh.traffic,
        parallel={block.run is in_parallel for block in blocks},
    )
    for block in blocks:
        block.register_forward_pre_hook(
            lambda module, inputs: seen.see_block(*inputs[:2])
        )
    for stage in engine.stages.values():
        stage.forward = functools.partial(_watched, stage.forward, seen, engine.stages)
        stage.backward_weights = functools.partial(
            _watched_half, stage.backward_weights, seen
        )
    return seen


def _watched(forward, seen: Seen, stages, *args):
    result = forward(*args)
    seen.forwards += 1
    seen.peak_alive = max(
        seen.peak_alive, sum(len(stage.live) for stage in stages.values())
    )
    return result


def _watched_half(backward_weights, seen: Seen, *args):
    seen.weight_halves += 1
    return backward_weights(*args)


@contextmanager
def counted_calls():
    """Yields a list to which runs add their names, in any thread of this process: core attention, MLPs, what
    makes batches."""
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, owner, method in (
            ("attention", CoreAttention, "forward"),
            ("attention", SharedKeysAttention, "forward"),
            ("mlp", MLP, "forward"),
            ("mlp", AfterAttention, "forward"),
            ("tile", MLP, "of_tile"),
            ("read", Loader, "_make"),
            ("packed", PackedDataset, "__getitem__"),
            ("fim", FillInMiddle, "_rearranged"),
            ("logits in chunks", LogitsInChunks, "cross_entropy"),
        ):
            patch.setattr(owner, method, _counting(name, getattr(owner, method), calls))
        yield calls


def _counting(name, method, calls):
    @functools.wraps(method)
    def counted(*args, **kwargs):
        calls.append(name)
        return method(*args, **kwargs)

    return counted
