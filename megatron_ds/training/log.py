"""What a run says: one line a step in Megatron's fields and order, and the same record to metric sinks.

A *sink* takes records; `SINKS` holds TensorBoard (Megatron's tags) and metrics.jsonl. Only rank 0 logs.
"""

import io
import json
import logging
import math
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Protocol

from ..config import RunConfig
from ..errors import ConfigError
from ..registry import Registry

logger = logging.getLogger(__name__)
SINKS: Registry = Registry("metric sink")


@dataclass(frozen=True)
class TrainRecord:
    """One logged interval; means over its steps. Times in seconds, rates per second over all ranks.

    kept_tokens        of each sequence, by the blocks that drop some; None where none do.  layer_tokens: as `Progress` has it
    actual_seq_length  tokens of a sequence that a block sees, on the mean over the blocks, rounded down
    data_seconds  in which rank 0 waited for its batch: none, as long as workers are ahead
    """

    step: int
    steps: int
    samples: int
    tokens: int
    step_seconds: float
    learning_rate: float
    weight_decay: float
    global_batch_size: int
    loss: float
    loss_scale: float
    grad_norm: float
    skipped_steps: int
    nan_steps: int
    seq_length: int
    tokens_per_second: float
    tflops_per_rank: float
    mfu: float
    eta_seconds: float
    memory_gib: float
    data_seconds: float
    kept_tokens: int | None = None
    layer_tokens: int = 0
    actual_seq_length: int = 0

    def line(self) -> str:
        """Megatron-LM's fields in its order, then tokens/s, MFU, memory and the time that is left."""
        fields = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {self.step:8d}/{self.steps:8d}",
            f"consumed samples: {self.samples:12d}",
            f"elapsed time per iteration (ms): {self.step_seconds * 1000:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {self.tflops_per_rank:.{1 if self.tflops_per_rank >= 1 else 3}f}",
            f"learning rate: {self.learning_rate:.6E}",
            f"global batch size: {self.global_batch_size:5d}",
            f"lm loss: {self.loss:.6E}",
            f"loss scale: {self.loss_scale:.1f}",
            f"grad norm: {self.grad_norm:.3f}",
            f"number of skipped iterations: {self.skipped_steps:3d}",
            f"number of nan iterations: {self.nan_steps:3d}",
            f"seq length: {self.seq_length:5d}",
            f"tokens per second: {self.tokens_per_second:.1f}",
            f"MFU: {self.mfu:.1%}",
            f"waiting for data (ms): {self.data_seconds * 1000:.1f}",
            *self._dropping(),
            f"memory (GiB): {self.memory_gib:.2f}",
            f"ETA: {timedelta(seconds=round(self.eta_seconds))}",
        ]
        return " | ".join(fields) + " |"

    def _dropping(self) -> list[str]:
        if self.kept_tokens is None:
            return []
        return [f"random ltd reserved length: {self.kept_tokens:5d}", f"actual seqlen: {self.actual_seq_length:5d}",
                f"consumed layer tokens: {self.layer_tokens:12d}"]


@dataclass(frozen=True)
class EvalRecord:
    """A finished evaluation. split: "validation" or "test"."""

    step: int
    samples: int
    split: str
    loss: float
    eval_seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(20.0, self.loss))

    def line(self) -> str:
        text = (f" {self.split} loss at iteration {self.step} | lm loss value: {self.loss:.6E} | "
                f"lm loss PPL: {self.perplexity:.6E} | ")
        return "\n".join(("-" * len(text), text, "-" * len(text)))


class Sink(Protocol):
    """Takes the records of a run.

    Its class has `open(config, steps_done)`, which returns None when not asked for, and `check(config)`, which raises
    ConfigError when what is asked for cannot be written to.
    """

    def train(self, record: TrainRecord) -> None: ...
    def evaluation(self, record: EvalRecord) -> None: ...
    def close(self) -> None: ...


class Log:
    """The console and every sink that the config asks for."""

    def __init__(self, sinks: Iterable[Sink]):
        self.sinks = list(sinks)

    def train(self, record: TrainRecord) -> None:
        logger.info("%s", record.line())
        for sink in self.sinks:
            sink.train(record)

    def evaluation(self, record: EvalRecord) -> None:
        logger.info("%s", record.line())
        for sink in self.sinks:
            sink.evaluation(record)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()


def check_log(config: RunConfig) -> None:
    """Raises ConfigError, naming the flag, for a sink that could not be written to."""
    for name in SINKS:
        SINKS[name].check(config)


def open_log(config: RunConfig, steps_done: int) -> Log:
    """The log of rank 0. steps_done: what a resumed run already has; later lines of an earlier try are superseded."""
    opened = (SINKS[name].open(config, steps_done) for name in SINKS)
    return Log(sink for sink in opened if sink is not None)


@SINKS.register("jsonl")
class JsonLines:
    """metrics.jsonl: one JSON object a record, `kind` "train" or "validation"; not-a-number is written as null."""

    def __init__(self, path: Path, steps_done: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= steps_done] if path.exists() else []
        beside = path.with_name(path.name + ".tmp")
        beside.write_text("".join(line + "\n" for line in kept))
        beside.replace(path)
        self.file = path.open("a", buffering=1)

    @classmethod
    def open(cls, config: RunConfig, steps_done: int):
        path = cls._path(config)
        return cls(path, steps_done) if path else None

    @classmethod
    def check(cls, config: RunConfig) -> None:
        path = cls._path(config)
        if path is None:
            return
        check_folder("--metrics-path", path.parent)
        if path.exists() and not path.is_file():
            raise ConfigError(f"--metrics-path {path} is not a file. Name a file, such as {path}/metrics.jsonl.")
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            first = file.readline()
        if first.strip() and _step_of(first) == math.inf:
            raise ConfigError(f"--metrics-path {path} exists and does not hold metrics: it would be overwritten. Name another "
                              "file, or remove this one.")

    @staticmethod
    def _path(config: RunConfig) -> Path | None:
        path, save = config.logging.metrics_path, config.checkpoint.save
        return Path(path) if path else Path(save) / "metrics.jsonl" if save else None

    def train(self, record: TrainRecord) -> None:
        self._write("train", asdict(record))

    def evaluation(self, record: EvalRecord) -> None:
        self._write(record.split, {**asdict(record), "perplexity": record.perplexity})

    def _write(self, kind: str, fields: dict) -> None:
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
        self.file.write(json.dumps({"kind": kind, **clean}) + "\n")

    def close(self) -> None:
        self.file.close()


def _step_of(line: str | bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf       # a line cut short by a crash


@SINKS.register("tensorboard")
class TensorBoard:
    """Scalars under Megatron-LM's tags, against steps and (" vs samples") against samples."""

    TRAIN_TAGS = {"learning-rate": "learning_rate", "batch-size": "global_batch_size", "lm loss": "loss",
                  "loss-scale": "loss_scale", "grad-norm": "grad_norm", "iteration-time": "step_seconds",
                  "throughput": "tflops_per_rank",
                  "batch-generator-time": "data_seconds"}

    def __init__(self, directory: str, steps_done: int):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(directory, purge_step=steps_done + 1 if steps_done else None)

    @classmethod
    def open(cls, config: RunConfig, steps_done: int):
        directory = config.logging.tensorboard_dir
        return cls(directory, steps_done) if directory else None

    @classmethod
    def check(cls, config: RunConfig) -> None:
        if config.logging.tensorboard_dir:
            check_folder("--tensorboard-dir", Path(config.logging.tensorboard_dir))

    def train(self, record: TrainRecord) -> None:
        for tag, field in self.TRAIN_TAGS.items():
            self._scalar(tag, getattr(record, field), record)
        self.writer.add_scalar("tokens-per-second", record.tokens_per_second, record.step)
        self.writer.add_scalar("mfu", record.mfu, record.step)
        if record.kept_tokens is not None:
            self._scalar("seqlen/random_ltd_reserved_length", record.kept_tokens, record)
            self._scalar("seqlen/actual_seq_length", record.actual_seq_length, record)
            self._scalar("consumed-layer-tokens", record.layer_tokens, record)

    def evaluation(self, record: EvalRecord) -> None:
        suffix = record.split
        self._scalar(f"lm loss {suffix}", record.loss, record)
        self._scalar(f"lm loss {suffix} ppl", record.perplexity, record)

    def _scalar(self, tag: str, value: float, record) -> None:
        self.writer.add_scalar(tag, value, record.step)
        self.writer.add_scalar(f"{tag} vs samples", value, record.samples)

    def close(self) -> None:
        self.writer.close()


def check_folder(flag: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror or error
        raise ConfigError(f"{flag}: nothing can be written in {folder} ({why}). Name a place that this user may write to, "
                          f"or leave out {flag}.") from error
