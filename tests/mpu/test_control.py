"""Control messages of a job on GPUs: one gloo group, whose ranks connect when they first exchange a message.

gloo is real here; of NCCL's groups only the list is kept.
"""

import os
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_ds.errors import CommunicationError
from megatron_ds.mpu import process_groups
from megatron_ds.mpu.control import forget, new_lazy_group, ring_gather
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import GETTER_GROUPS, Mesh
from megatron_ds.mpu.nccl_settings import NcclSettings
from megatron_ds.mpu.transport import TorchTransport
from tests.harness.fake_cuda import DeviceTensor, FakeGpu, fake_cuda
from tests.harness.limits import HUNG, VAIN
from tests.harness.processes import run_processes

pytestmark = pytest.mark.one_in(2, together=True)

MOST_SOCKETS = 200  # of a rank of 1,024
OF_THE_STORE = 4  # its connection, that of reports, a listener of gloo and of the store
LARGE = {
    "data": Grid.fit(1024),
    "tp 8, pp 8": Grid.fit(1024, tp=8, pp=8),
    "tp 8, pp 16, cp 2": Grid.fit(1024, tp=8, pp=16, cp=2),
    "ep 64": Grid.fit(1024, ep=64),
}
SMALL = Grid.fit(6, tp=2, pp=3)


def groups_of(grid, rank):
    """The ranks of each group of this rank that a run connects."""
    found = []
    for axes in GETTER_GROUPS:
        if axes == ("embd",):
            lists = grid.embedding_groups()
        elif axes == ("world",):
            lists = grid.groups("tp", "cp", "dp", "pp")
        else:
            lists = grid.groups(*axes)
        found += [(axes, ranks) for ranks in lists if rank in ranks and len(ranks) > 1]
    return found


def peers_of(grid, rank):
    """The ranks with which a rank exchanges objects in each of its groups, and shapes in its pipeline."""
    peers = set()
    for _, ranks in groups_of(grid, rank):
        at = ranks.index(rank)
        peers |= {ranks[(at + 1) % len(ranks)], ranks[at - 1]}
    return peers


def sockets_open():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.plan
@pytest.mark.parametrize("name", LARGE)
def test_a_rank_of_a_thousand_opens_fewer_than_200_sockets(name):
    grid = LARGE[name]
    for rank in (0, 1, 517, 1023):
        assert len(peers_of(grid, rank)) + OF_THE_STORE < MOST_SOCKETS
        with_gloo_in_each = sum(
            len(ranks) - 1 for ranks in {ranks for _, ranks in groups_of(grid, rank)}
        )
        assert with_gloo_in_each > 1000


def wait_for_all(name, size):
    """Wait until all ranks are here, by the store, to which each has a connection already."""
    store = dist.distributed_c10d._get_default_store()
    store.add(name, 1)
    while store.add(name, 0) < size:
        time.sleep(0.01)


def count_sockets(rank, world):
    control = new_lazy_group(timedelta(seconds=HUNG))
    made = sockets_open()
    wait_for_all("counted", world.size)  # a peer that connects earlier would count
    for axes, ranks in groups_of(SMALL, rank):
        objects = ring_gather((axes, rank, "x" * rank), ranks, "-".join(axes), control)
        assert objects == [(axes, other, "x" * other) for other in ranks]
    wait_for_all("connected", world.size)
    connected = sockets_open()
    wait_for_all("counted again", world.size)
    before_mesh = sockets_open()
    whole = dist.new_group(backend="gloo")
    meshed = sockets_open()
    wait_for_all("meshed", world.size)  # a peer that leaves earlier would close its end
    dist.destroy_process_group(whole)
    dist.destroy_process_group(control)
    return connected - made, meshed - before_mesh


@pytest.mark.processes
def test_real_ranks_have_a_connection_to_each_peer_that_was_counted():
    for rank, (control, mesh) in enumerate(run_processes(6, count_sockets)):
        assert control == len(peers_of(SMALL, rank))
        assert mesh >= SMALL.world_size - 1


def messages(rank, world, folder):
    """Objects of groups, messages of CPU tensors, and a rank that does not come."""
    control = new_lazy_group(timedelta(seconds=VAIN))
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    found = {}
    # A barrier of the transport, objects, and shapes, with lanes that must not be used.
    if rank < 2:
        transport = TorchTransport(pairs[0], "pp", [None] * 4, control)
        transport.barrier()
        found["objects"] = transport.all_gather_object({"rank": rank})
        shapes = torch.arange(5) * (rank + 1)
        sent = transport.isend(shapes, 1 - rank, 0)
        received = torch.empty_like(shapes)
        transport.irecv(received, 1 - rank, 0).wait()
        sent.wait()
        found["shapes"] = received.tolist()
    # Rank 2 does not come to the objects of ranks 1 and 2.
    if rank == 1:
        try:
            TorchTransport(pairs[1], "dp", (), control).all_gather_object("here")
        except CommunicationError as error:
            found["error"] = str(error)
        (folder / "error").touch()
    while rank == 2 and not (folder / "error").exists():
        time.sleep(0.05)
    return found


@pytest.mark.processes
def test_objects_and_shapes_travel_by_the_control_group_and_a_stuck_rank_is_named(
    tmp_path,
):
    first, second, third = run_processes(3, messages, tmp_path)
    assert first["objects"] == second["objects"] == [{"rank": 0}, {"rank": 1}]
    assert first["shapes"] == [0, 2, 4, 6, 8] and second["shapes"] == [0, 1, 2, 3, 4]
    assert (
        "all-gather of objects failed in the dp group of ranks [1, 2]"
        in second["error"]
    )
    assert "2" in second["error"].split("stuck")[0] and third == {}


def record_groups(rank, world):
    """The groups that a mesh of GPUs makes, by their backend."""
    made, new_group = [], dist.new_group

    def recorded(ranks=None, timeout=None, backend=None, group_desc=None, **more):
        made.append((backend, group_desc))
        return new_group(ranks, timeout, "gloo", group_desc=group_desc)

    with (
        patch.object(process_groups, "_has_nccl", lambda: True),
        patch.object(dist, "new_group", recorded),
        patch.object(TorchTransport, "open_lanes", lambda transport, device: None),
        patch.object(torch.cuda, "current_device", lambda: 0),
        # torch of CPUs has no options of NCCL
        patch.object(NcclSettings, "options", lambda *_: None),
    ):
        mesh = Mesh(Grid.fit(4, tp=2, pp=2), rank, process_groups.connect_torch)
        mesh.connect(GETTER_GROUPS)
        names = mesh.group("world").transport.all_gather_object(rank)
        mesh.close()
    forget()
    return made, names


@pytest.mark.processes
def test_one_group_has_gloo_and_all_others_nccl_alone():
    for made, names in run_processes(4, record_groups):
        assert [name for backend, name in made if backend == "gloo"] == ["control"]
        assert {backend for backend, _ in made} == {"gloo", "nccl"} and len(made) > 8
        assert names == [0, 1, 2, 3]


@pytest.mark.plan
def test_collectives_of_cpu_tensors_go_by_way_of_the_gpu():
    class Finished:
        def wait(self):
            pass

    def doubled(tensor, op, group, async_op):
        assert isinstance(tensor, DeviceTensor)
        tensor.mul_(2)
        return Finished()

    transport = TorchTransport.__new__(TorchTransport)
    transport.is_of_gpus_alone = True
    transport.process_group = SimpleNamespace(_device_types=())
    x = torch.arange(3.0)
    with fake_cuda(), FakeGpu(), patch.object(dist, "all_reduce", doubled):
        transport.all_reduce(x, "sum").wait()
    assert x.tolist() == [0, 2, 4]
