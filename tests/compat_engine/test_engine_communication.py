"""The communication log of engines: its JSON block, exact bytes of a step, and `comm.log_summary`."""

import pickle

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.compat.config.targets import reading_for
from megatron_ds.compat.deepspeed import functions
from megatron_ds.compat.engine import communication
from megatron_ds.extensions.profiler.communication_log import CommunicationLog
from tests.harness.engine_runs import on_ranks
from tests.harness.processes import run_processes

BASE = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "gradient_clipping": 0.0,
}
ON = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
OPS = "profiler.comms_logger_ops"


def settings_of(block, target):
    reading = reading_for({**BASE, "comms_logger": block}, target, "ds.json")
    assert not reading.problems
    found = {s.path: s.value for s in reading.settings if "comms_logger" in s.path}
    return found, reading.without_effect


@pytest.mark.plan
@pytest.mark.parametrize("target", ["train", "engine"])
def test_the_block_sets_the_options(target):
    on = {"profiler.comms_logger": True, "profiler.comms_logger_verbose": False}
    assert settings_of(ON, target) == (on, {})
    # prof_ops have an effect without prof_all only, by DeepSpeed's names
    ops = ["all_reduce", "all_to_all_single", "all_reduce_coalesced", "gather"]
    assert settings_of({**ON, "prof_ops": ops}, target) == (on, {})
    found, notes = settings_of({**ON, "prof_all": False, "prof_ops": ops}, target)
    assert found == on | {OPS: ("all_reduce", "all_to_all", "all_to_all_v")}
    assert notes["ds.json comms_logger.prof_ops"] == "there is no operation gather here"
    assert settings_of({**ON, "prof_all": False}, target)[0][OPS] == ()
    # debug is noted; a block that is off asks for nothing; names are checked
    assert settings_of({**ON, "debug": True}, target)[1]
    off, _ = settings_of({**ON, "enabled": False, "prof_all": False}, target)
    assert off == {"profiler.comms_logger": False}
    wrong = {**BASE, "comms_logger": {"enable": True}}
    assert "comms_logger.enable" in reading_for(wrong, target).problems[0]


def summaries(monkeypatch, block, has_waits=False):
    """What each of 2 ranks has recorded in one step of 384 weights in fp32, and what was shown."""
    shown = []
    monkeypatch.setattr(communication, "show", shown.append)
    once = lambda text, ranks: shown.append(text)
    monkeypatch.setattr(functions, "log_dist_once", once)

    def main(engine, rank):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        megatron_ds.comm.log_summary(show_straggler=has_waits)
        log = engine.world.traffic.log
        return log and {
            (key.operation, key.axes, key.size, key.num_bytes): spent.calls
            for key, spent in log.rows.items()
        }

    make = lambda: nn.Linear(4, 96, bias=False)
    return on_ranks(2, main, make, {**BASE, **block}), shown


@pytest.mark.threads
@pytest.mark.parametrize("has_waits", [False, True])
def test_a_step_has_the_bytes_of_its_gradients_and_rank_0_shows_the_table(
    has_waits, monkeypatch
):
    ranks, [text] = summaries(monkeypatch, {"comms_logger": ON}, has_waits)
    for rows in ranks:
        assert rows["all_reduce", "dp-cp", 2, 384 * 4] == 1
    assert text.startswith("communication of rank 0")
    assert ("waited" in text) == has_waits
    assert "dp-cp of 2" in text and "1.54 kB" in text


@pytest.mark.threads
def test_nothing_is_recorded_without_the_block_and_the_summary_has_advice(monkeypatch):
    ranks, shown = summaries(monkeypatch, {})
    assert ranks == [None, None]
    assert len(shown) == 2 and all('"comms_logger": {"enabled"' in t for t in shown)


def own_calls(rank, world):
    """What is recorded of collectives that a program calls itself, with their results."""
    log = CommunicationLog()
    token = communication._log.set((log, world))
    comm = megatron_ds.comm
    try:
        summed = torch.full((6,), float(rank + 1))
        work = comm.all_reduce(summed, async_op=True)
        work.wait()
        assert work.is_completed() and work.get_future() is not None
        comm.broadcast(torch.zeros(4), 0)
        pieces = [torch.zeros(3), torch.zeros(3)]
        comm.all_gather(pieces, torch.full((3,), float(rank)))
        whole = torch.zeros(2)
        comm.all_gather_into_tensor(whole, torch.full((1,), float(rank)))
        piece = torch.zeros(1)
        comm.reduce_scatter_tensor(piece, torch.arange(2.0))
        total = torch.full((5,), float(rank + 1))
        comm.reduce(total, 0)
        exchanged = torch.zeros(2)
        comm.all_to_all_single(exchanged, torch.tensor([10.0, 20.0]) + rank)
        # objects, whose sizes differ between the ranks
        named = [None, None]
        comm.all_gather_object(named, "a" * 100 * (rank + 1))
        sent = ["settings", {"step": 3}] if rank == 0 else [None, None]
        comm.broadcast_object_list(sent, 0)
        # a message, and what has no payload of its own
        letter = torch.full((9,), float(rank))
        comm.send(letter, 1) if rank == 0 else comm.recv(letter, 0)
        comm.barrier()
    finally:
        communication._log.reset(token)
    comm.all_reduce(summed)
    rows = {
        (m.operation, m.axes, m.size, m.num_bytes): s.calls for m, s in log.rows.items()
    }
    assert [*map(len, named)] == [100, 200] and sent[1] == {"step": 3}
    assert letter.tolist() == [0.0] * 9
    of_rank_0 = total[0].item() if rank == 0 else None
    gathered = [pieces[1][0].item(), whole.tolist(), piece.item()]
    return rows, [summed[0].item(), *gathered, of_rank_0, exchanged.tolist()]


@pytest.mark.processes
def test_collectives_that_a_program_calls_itself_are_rows_of_their_own():
    pickled = lambda *objects: sum(len(pickle.dumps(found)) for found in objects)
    gathered = pickled("a" * 100, "a" * 200)
    broadcast = pickled("settings", {"step": 3})
    for rank, (rows, results) in enumerate(run_processes(2, own_calls)):
        assert rows == {
            ("all_reduce", "program", 2, 24): 1,
            ("broadcast", "program", 2, 16): 1,
            ("all_gather", "program", 2, 24): 1,
            ("all_gather", "program", 2, 8): 1,
            ("reduce_scatter", "program", 2, 8): 1,
            ("reduce", "program", 2, 20): 1,
            ("all_to_all", "program", 2, 8): 1,
            ("all_gather", "objects", 2, gathered): 1,
            ("broadcast", "objects", 2, broadcast): 1,
        } | ({("send", "program", 2, 36): 1} if rank == 0 else {})
        of_rank = [[3.0, [10.0, 11.0]], [None, [20.0, 21.0]]][rank]
        assert results == [6.0, 1.0, [0.0, 1.0], 2.0 * rank, *of_rank]
