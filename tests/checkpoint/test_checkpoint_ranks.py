import os
import signal

import pytest
import torch

from megatron_ds.checkpoint.load import latest, load
from megatron_ds.checkpoint.pieces import written_here
from megatron_ds.checkpoint.save import save
from tests.harness.processes import run_processes
from tests.harness.states import Layout, pieces_of, tp_coordinates

pytestmark = pytest.mark.processes

SLICED = Layout(dp=2, stage=1)
SPLIT = Layout(tp=2, padded=14)


def groups(layout, rank, world):
    return {
        "coordinates": tp_coordinates(layout, rank),
        "world": world.group("world", range(world.size), rank),
    }


def save_step(rank, world, folder, layout, step, seed):
    save(
        folder,
        step,
        pieces_of(layout, rank, seed),
        run={},
        **groups(layout, rank, world),
    )


def load_is_equal(rank, world, folder, layout, seed):
    pieces = pieces_of(layout, rank, seed=None)
    load(folder, latest(folder), pieces, **groups(layout, rank, world))
    return all(
        torch.equal(p.tensor, right.tensor)
        for p, right in zip(pieces, pieces_of(layout, rank, seed), strict=True)
    )


def save_and_lose_a_rank(rank, world, folder, layout, step, seed):
    """Rank 1 dies when half of its chunks are written."""
    from megatron_ds.checkpoint import storage

    if rank == 1:
        coordinates = tp_coordinates(layout, rank)
        mine = written_here(pieces_of(layout, rank, seed), coordinates)
        held, written, values_of = (
            len(list(storage.chunks_of(mine, coordinates))),
            [],
            storage.values_of,
        )

        def values_or_die(piece, view):
            written.append(view)
            if len(written) * 2 > held:
                os.kill(os.getpid(), signal.SIGKILL)
            return values_of(piece, view)

        storage.values_of = values_or_die
    save_step(rank, world, folder, layout, step, seed)


@pytest.mark.quick
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_previous_checkpoint_for_any_layout(
    tmp_path,
):
    run_processes(2, save_step, tmp_path, SLICED, 10, 1)
    with pytest.raises(RuntimeError, match="rank 1 of 2 died"):
        run_processes(2, save_and_lose_a_rank, tmp_path, SLICED, 20, 2)
    assert not (tmp_path / "iter_0000020").exists()
    assert all(run_processes(2, load_is_equal, tmp_path, SPLIT, 1))
    run_processes(2, save_step, tmp_path, SPLIT, 30, 3)
    assert all(run_processes(2, load_is_equal, tmp_path, SLICED, 3))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iter_0000010",
        "iter_0000030",
        "latest_checkpointed_iteration.txt",
    ]
