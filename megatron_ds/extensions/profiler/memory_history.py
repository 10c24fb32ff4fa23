"""`MemoryHistory`: what takes the memory of a rank (--record-memory-history).

    CUDA   torch's record of every allocation with its call stack, written to --memory-snapshot-path when training
           ends, also by an error: https://pytorch.org/memory_viz shows it. Rank 0 and the last rank write one.
    all    a record "memory" of rank 0 in metrics.jsonl: bytes by owner, planned beside measured. On CPUs, whose
           allocations torch does not record, it is all, and --memory-snapshot-path has the same as JSON.

Measured bytes of weights, gradients, masters, moments and buffers are those of the tensors. Those of activations are
the maximum during the second step of the process: on CPUs of the storages that operations of the step made, on GPUs of
what is allocated above the state and the buffers.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from ...host import places
from ...ops.widened_products import WORKSPACE
from ...planning.fake_stages import LiveBytes
from ...training.build import Replica
from ...training.moments import RunStart
from ...training.observe.sink import reason_of
from ...training.observer import LAST, Observer
from ..dry_run.world_plan import plan_world
from .memory_record import MemoryRecord
from .options import ProfilerConfig

logger = logging.getLogger(__name__)
MOST_ENTRIES = 1_000_000  # of torch's record: about 1 GB of host memory
MEASURED = 2  # step of the process: the first one allocates what stays


class MemoryHistory:
    """The memory of one rank. Does nothing without --record-memory-history."""

    def __init__(self, replica: Replica):
        mesh = replica.mesh
        self._engine = replica
        self._is_cuda = mesh.device.type == "cuda"
        is_wanted = replica.config.of(ProfilerConfig).record_memory_history
        self._is_measured = is_wanted and mesh.rank == 0
        ends = (0, mesh.grid.world_size - 1)
        self._has_snapshot = is_wanted and self._is_cuda and mesh.rank in ends
        self._path = snapshot_path(
            replica.config.of(ProfilerConfig).memory_snapshot_path, mesh.rank
        )
        self._steps = 0
        if self._has_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)
        elif self._is_measured:
            logger.info(
                "torch records no history of CPU memory: %s will have the bytes of rank 0 by owner, planned and "
                "measured (--record-memory-history)",
                self._path,
            )

    @contextmanager
    def step(self) -> Iterator[list[MemoryRecord]]:
        """A context around a training step. The list has a record when the step that is measured has ended."""
        self._steps += 1
        records: list[MemoryRecord] = []
        if not self._is_measured or self._steps != MEASURED:
            yield records
            return
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._engine.mesh.device)
            yield records
            records.append(self._timed(self._peak_of_gpu()))
        else:
            # The workspace is made anew, so that it counts.
            with LiveBytes(peak=True) as live, WORKSPACE.apart():
                yield records
            records.append(self._timed(live.peak))

    def finish(self) -> None:
        """Write torch's record, if there is one, and stop recording."""
        if not self._has_snapshot:
            return
        self._has_snapshot = False
        dump = torch.cuda.memory._dump_snapshot
        with places.phase(places.EXPORTING):
            self._write(lambda: dump(str(self._path)))
        torch.cuda.memory._record_memory_history(enabled=None)

    def _peak_of_gpu(self) -> int:
        """Return the most bytes of the step above the state and the buffers that are on the device."""
        optimizer = self._engine.optimizer
        held = optimizer.memory_by_place().get("device", 0) + optimizer.working_bytes
        return torch.cuda.max_memory_allocated(self._engine.mesh.device) - held

    def _timed(self, at_work: int) -> MemoryRecord:
        """Return the record, with the time that it took; on CPUs it is also written to the path."""
        begin = time.perf_counter()
        record = self._record(at_work)
        if not self._is_cuda:
            self._write(lambda: self._path.write_text(text_of(record)))
        return replace(record, measuring_seconds=time.perf_counter() - begin)

    def _record(self, at_work: int) -> MemoryRecord:
        """Return the bytes of this rank, planned and measured. at_work: measured for activations"""
        replica = self._engine
        state = replica.optimizer.memory()
        plan = plan_world(replica.config, replica.mesh.rank, replica.mesh.device.type)
        planned = plan.rank_plan(replica.mesh.rank)
        return MemoryRecord(
            step=self._steps,
            planned={
                "weights": planned.state.parameters,
                "gradients": planned.state.gradients,
                "masters": planned.state.masters,
                "moments": planned.state.optimizer,
                "buffers": planned.buffers,
                "activations": planned.kept + planned.at_work,
            },
            measured={
                "weights": state.parameters,
                "gradients": state.gradients,
                "masters": state.masters,
                "moments": state.optimizer,
                "buffers": replica.optimizer.working_bytes,
                "activations": at_work,
            },
        )

    def _write(self, write) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write()
        except OSError as error:
            logger.warning(
                "cannot write %s: %s. Training continues without it.",
                self._path,
                reason_of(error),
            )
            return
        logger.info("wrote %s", self._path)


def snapshot_path(path: str, rank: int) -> Path:
    """Return the file of a rank: that of rank 0 has the name as given, others' their rank before the suffix."""
    first = Path(path)
    return first.with_stem(f"{first.stem}-rank-{rank}") if rank else first


def text_of(record: MemoryRecord) -> str:
    """Return the record as JSON, for people."""
    fields = record.fields()
    del fields["measuring_seconds"]  # which ends when the file is written
    return json.dumps(fields, indent=1) + "\n"


class MemoryOfSteps(Observer):
    """--record-memory-history: bytes by owner, planned and measured."""

    place = LAST

    def run_started(self, start: RunStart) -> None:
        """Begin to record."""
        self._note = start.note
        self._history = MemoryHistory(start.replica)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Measure the step, if it is the one that is measured."""
        with self._history.step() as records:
            yield
        for record in records:
            self._note(record)

    def closed(self) -> None:
        """Write torch's record."""
        self._history.finish()
