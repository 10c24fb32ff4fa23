"""TensorBoard's event files: scalars under Megatron-LM's tags.

    DIR/events.out.tfevents.…          all tags; x is the number of steps
    DIR/samples/events.out.tfevents.…  losses as "lm loss vs samples" and the like; x is the number of samples

A process that resumes begins its event file with a SessionLog START at its first step. TensorBoard then drops
the points at that x and beyond, which an earlier process wrote before it crashed. The marker applies to all
tags of a folder, so a folder can have only one unit of x: if samples and steps shared one, each resume would
drop every point against samples. TensorBoard shows the second folder as the run "samples".

`SummaryWriter` is not used, because its background thread reports disk errors late and prints a traceback of
its own. One point per log line needs no thread.
"""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from ...config import RunConfig
from ...progress.ramps import Progress
from ...training.observe.records import EvalRecord, Record, TrainRecord
from ...training.observe.sink import AppendedFile

TAGS = {
    "learning-rate": "learning_rate",
    "decoupled-learning-rate": "decoupled_learning_rate",
    "batch-size": "global_batch_size",
    "loss-scale": "loss_scale",
    "grad-norm": "grad_norm",
    "grad-noise-scale": "grad_noise_scale",
    "iteration-time": "step_seconds",
    "throughput": "tflops_per_rank",
    "batch-generator-time": "data_seconds",
    "num-zeros": "num_zeros",
    "params-norm": "params_norm",
    "tokens-per-second": "tokens_per_second",
    "mfu": "mfu",
}
TOKEN_TAGS = {
    "seqlen/actual_seq_length": "actual_seq_length",
    "consumed-layer-tokens": "layer_tokens",
}


class TensorBoard:
    """The sink for TensorBoard. Each record becomes one event in each of the two folders."""

    def __init__(self, directory: Path, timers: bool = False):
        """timers: whether to write the times of phases."""
        self.place = directory
        self._timers = timers
        self.begin(Progress())

    def begin(self, progress: Progress) -> None:
        """Begin the files of a process. TensorBoard drops points of earlier processes beyond its progress."""
        self._steps = EventFile(self.place, progress.step + 1)
        self._samples = EventFile(self.place / "samples", progress.samples + 1)

    def write(self, record: Record) -> None:
        """Write the values of the record, or raise OSError."""
        # Losses and metrics are drawn against steps and against samples, other values against steps only.
        losses, others = scalars_of(record, self._timers)
        self._steps.write(losses | others, record.step)
        self._samples.write(
            {f"{tag} vs samples": value for tag, value in losses.items()},
            record.samples,
        )


def scalars_of(
    record: Record, timers: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """(losses and metrics, other values) of a record by tag. timers: with the times of phases."""
    if isinstance(record, EvalRecord):
        split = record.split
        others: dict[str, float] = {}
        losses = {f"lm loss {split}": record.loss}
        perplexity = record.perplexity
        if perplexity is not None:
            losses[f"lm loss {split} ppl"] = perplexity
        losses |= {f"{name} {split}": mean for name, mean in record.metrics.items()}
    elif isinstance(record, TrainRecord):
        losses = {"lm loss": record.loss, **record.metrics}
        tags = TAGS
        if record.kept_tokens is not None:
            kept = f"seqlen/{record.kept_title.replace(' ', '_')}"
            tags = TAGS | {kept: "kept_tokens"} | TOKEN_TAGS
        values = ((tag, getattr(record, name)) for tag, name in tags.items())
        times = record.times if timers else {}
        others = (
            {tag: value for tag, value in values if value is not None}
            | dict(record.tags)
            | {
                f"{name}-time": max(seconds.values())
                for name, seconds in times.items()
                if name != "batch-generator"
            }
        )
    else:
        losses, others = record.curves()
    return losses, others


class EventFile:
    """An event file of this process; also a sink of points, for `Tolerant`."""

    def __init__(self, directory: Path, first: int | None = None):
        """first: x from which on TensorBoard drops the points of earlier files; None: it keeps them."""
        from tensorboard.compat.proto import event_pb2

        now = time.time()
        # Readers sort the files of a folder by name: fractional digits order two starts within one second.
        path = (
            directory
            / f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{os.getpid()}"
        )
        header = _framed(event_pb2.Event(wall_time=now, file_version="brain.Event:2"))
        if first is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            header += _framed(
                event_pb2.Event(wall_time=now, step=first, session_log=start)
            )
        self.place = directory
        self._file = AppendedFile(path, header=header)

    def write(self, values: Mapping[str, float], x: int) -> None:
        """Write one event with a point for each tag completely, or raise OSError and write nothing."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        scalars = [
            summary_pb2.Summary.Value(tag=tag, simple_value=value)
            for tag, value in values.items()
        ]
        summary = summary_pb2.Summary(value=scalars)
        self._file.append(
            _framed(event_pb2.Event(wall_time=time.time(), step=x, summary=summary))
        )


def made(config: RunConfig, run_id: str) -> TensorBoard:
    """Return the sink of --tensorboard-dir."""
    options = config.logging
    return TensorBoard(Path(options.tensorboard_dir), options.log_timers_to_tensorboard)


def points(config: RunConfig, run_id: str) -> EventFile:
    """Return the sink of points of --tensorboard-dir."""
    return EventFile(Path(config.logging.tensorboard_dir))


def _framed(event) -> bytes:
    """Return the event with its length and checksums, as in an event file."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
