"""--record-memory-history: measured bytes beside planned ones, and torch's record on a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.extensions.profiler import memory_history
from megatron_ds.extensions.profiler.memory_history import MemoryHistory
from megatron_ds.extensions.profiler.memory_record import MemoryRecord
from megatron_ds.extensions.profiler.options import ProfilerConfig
from tests.harness.pretraining import MOCK, train

pytestmark = pytest.mark.processes


def memory_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == "memory"]


def test_measured_bytes_are_those_that_were_planned(tmp_path):
    file = tmp_path / "made" / "memory.json"
    words = ["--record-memory-history", "--memory-snapshot-path", str(file)]
    layout = ["--pipeline-model-parallel-size", "2"]
    [first, _] = train(2, [*MOCK, *words, *layout, "--save", str(tmp_path / "run")])
    assert "torch records no history of CPU memory" in first.out
    [record] = memory_of(tmp_path / "run")
    planned = record["planned"]
    measured = record["measured"]
    assert record["step"] == 2
    # By hand: the first stage has an embedding [61, 32], positions [16, 32] and a block, all in fp32.
    block = 4 * 32 * 32 + 2 * 4 * 32 * 32 + (3 + 1 + 4 + 1) * 32 + 2 * 2 * 32
    elements = (61 + 16) * 32 + block
    each = {name: measured[name] // elements for name in ("weights", "moments")}
    assert each == {"weights": 4, "moments": 8}
    state = ("weights", "gradients", "masters", "moments")
    assert [measured[name] for name in state] == [planned[name] for name in state]
    # What is measured has the noise of what the step does around its stages.
    assert measured["activations"] == pytest.approx(planned["activations"], rel=0.1)
    assert record["measuring_seconds"] > 0
    written = json.loads(file.read_text())
    assert written == {name: record[name] for name in ("step", "planned", "measured")}


def test_without_the_flag_nothing_is_measured(tmp_path):
    train(1, [*MOCK, "--save", str(tmp_path / "run")])
    assert not memory_of(tmp_path / "run")


@pytest.mark.parametrize("rank, name", [(0, "s.pickle"), (3, "s-rank-3.pickle")])
def test_on_gpus_torch_records_until_the_end_of_training(
    tmp_path, monkeypatch, rank, name
):
    calls = []
    of_torch = torch.cuda.memory
    record = lambda **options: calls.append(options)
    monkeypatch.setattr(of_torch, "_record_memory_history", record)
    monkeypatch.setattr(of_torch, "_dump_snapshot", calls.append)
    history = MemoryHistory(engine_on_gpu(rank, tmp_path))
    assert [*calls[0]] == ["max_entries"]
    history.finish()
    history.finish()
    assert calls[1:] == [str(tmp_path / name), {"enabled": None}]


def test_ranks_between_the_ends_record_nothing(tmp_path, monkeypatch):
    calls = []
    for name in ("_record_memory_history", "_dump_snapshot"):
        monkeypatch.setattr(
            torch.cuda.memory, name, lambda *args, **how: calls.append(how)
        )
    MemoryHistory(engine_on_gpu(1, tmp_path)).finish()
    assert not calls
    assert not list(tmp_path.iterdir())


def engine_on_gpu(rank, folder):
    """What is read of a run of four ranks on GPUs before its first step."""
    options = ProfilerConfig(
        record_memory_history=True, memory_snapshot_path=str(folder / "s.pickle")
    )
    mesh = SimpleNamespace(
        rank=rank,
        device=torch.device("cuda"),
        grid=SimpleNamespace(world_size=4),
    )
    config = SimpleNamespace(of={ProfilerConfig: options}.get)
    return SimpleNamespace(config=config, mesh=mesh)


def test_the_plan_and_the_file_are_timed_by_themselves(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(memory_history.time, "perf_counter", lambda: clock.now)

    def pass_time(history, *values):
        clock.now += 2.0
        return MemoryRecord(history._steps, {"weights": 4}, {"weights": 4})

    monkeypatch.setattr(MemoryHistory, "_record", pass_time)
    engine = engine_on_gpu(0, tmp_path)
    engine.mesh.device = torch.device("cpu")
    history = MemoryHistory(engine)
    found = []
    for _ in range(3):
        with history.step() as records:
            clock.now += 16.0  # of the step itself
        found += [record.measuring_seconds for record in records]
    assert found == [2.0]
