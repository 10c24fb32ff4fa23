"""Records that a run logs: one for an interval of training steps, one for an evaluation.

Each record has `line()`, in Megatron-LM's format for log files, `short(width)`, for terminals, and `fields()`,
plain values for sinks. Observers write records of their own, such as one of a step whose update was dropped.

Note: what a narrow terminal shows. The words of a field are the same at every width, so that a line of a terminal is
found again in a search of these pages; fields are left out instead, the least important first, until the line fits.
The time that is left goes first, as the bar below the lines has it. Files and pipes have all fields.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple, cast

# "decoder.layers.3 max load": a metric of one layer (see batch/ledger.py).
OF_LAYER = re.compile(r"[a-z]\S*\.\d+\S* (.+)")
# Metrics of layers of which small values need attention; of all others, large ones.
LEAST = {"router entropy"}


class Record:
    """What a run logs. step, samples: so far, with those of the record."""

    step: int
    samples: int

    @property
    def kind(self) -> str:
        """The kind of the record in metrics.jsonl."""
        raise NotImplementedError

    def line(self) -> str:
        """Return the line of a log file, in Megatron-LM's format."""
        raise NotImplementedError

    def short(self, width: int) -> str:
        """Return a line for a terminal of so many columns; of rare records the same, which the log breaks."""
        return self.line()

    def fields(self) -> dict[str, Any]:
        """Plain values by name, for sinks."""
        return asdict(cast(Any, self))

    def curves(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (losses and metrics, other values) of a record of an observer, by the tag of its curve."""
        return {}, {}


@dataclass(frozen=True)
class TrainRecord(Record):
    """One logged interval: means over its steps. Times in seconds, rates per second over all ranks.

    mfu                model FLOP/s as a fraction of the device's peak; None when the peak is unknown
    kept_tokens        per sequence, in the blocks that drop tokens; None when no block drops tokens
    kept_title         of this number in the line of the log, as `progress.kept_tokens.KeptTokens` has it
    layer_tokens       consumed tokens, counted once for each block that processed them
    actual_seq_length  tokens per sequence that a block processes, mean over the blocks, rounded down
    data_seconds       time that rank 0 waited for its batch; 0 while the loader is ahead
    metrics            loss terms and metrics that layers added, by name
    num_zeros          elements of the gradient that are zero, with those of padding rows of the vocabulary;
                       None unless they are counted
    params_norm        of all weights; None unless it is computed
    times              phase → rank → seconds per step of each rank that had it, with --timing-log-level
    tags               values for TensorBoard alone, by tag
    grad_noise_scale   in samples; None unless it is measured
    decoupled_learning_rate  of word embeddings and output layers; None if it is `learning_rate`
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
    mfu: float | None
    eta_seconds: float
    memory_gib: float
    data_seconds: float
    kept_tokens: int | None = None
    kept_title: str = ""
    layer_tokens: int = 0
    actual_seq_length: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_zeros: int | None = None
    params_norm: float | None = None
    times: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    tags: Mapping[str, float] = field(default_factory=dict)
    decoupled_learning_rate: float | None = None
    grad_noise_scale: float | None = None

    kind = "train"

    def line(self) -> str:
        """Megatron-LM's fields in its order, then tokens/s, MFU, memory and the remaining time."""
        digits = 1 if self.tflops_per_rank >= 1 else 3
        dropping = []
        if self.kept_tokens is not None:
            dropping = [
                f"{self.kept_title}: {self.kept_tokens:5d}",
                f"actual seqlen: {self.actual_seq_length:5d}",
                f"consumed layer tokens: {self.layer_tokens:12d}",
            ]
        # Fields of features that are off are left out, as in Megatron-LM's line.
        fields = [
            f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {self.step:8d}/{self.steps:8d}",
            f"consumed samples: {self.samples:12d}",
            f"elapsed time per iteration (ms): {self.step_seconds * 1000:.1f}",
            f"throughput per GPU (TFLOP/s/GPU): {self.tflops_per_rank:.{digits}f}",
            f"learning rate: {self.learning_rate:.6E}",
            *_known("decoupled learning rate: {:.6E}", self.decoupled_learning_rate),
            f"global batch size: {self.global_batch_size:5d}",
            f"lm loss: {self.loss:.6E}",
            *(
                f"{name}: {mean:.6E}"
                for name, mean in over_layers(self.metrics).items()
            ),
            f"loss scale: {self.loss_scale:.1f}",
            f"grad norm: {self.grad_norm:.3f}",
            *_known("num zeros: {}", self.num_zeros),
            *_known("gradient noise scale: {:.1f}", self.grad_noise_scale),
            *_known("params norm: {:.3f}", self.params_norm),
            f"number of skipped iterations: {self.skipped_steps:3d}",
            f"number of nan iterations: {self.nan_steps:3d}",
            f"seq length: {self.seq_length:5d}",
            f"tokens per second: {self.tokens_per_second:.1f}",
            *_known("MFU: {:.1%}", self.mfu),
            f"waiting for data (ms): {self.data_seconds * 1000:.1f}",
            *dropping,
            f"memory (GiB): {self.memory_gib:.2f}",
            f"ETA: {timedelta(seconds=round(self.eta_seconds))}",
        ]
        return " | ".join(fields) + " |"

    def short(self, width: int) -> str:
        """Return the fields that fit the width; numbers of skipped and NaN steps only if they are not 0."""
        left = clock(self.eta_seconds)
        parts = [
            LineField(f"step {self.step}/{self.steps}"),
            LineField(f"loss {self.loss:.4f}"),
            *_parts_over_layers(self.metrics),
            LineField(f"grad norm {self.grad_norm:.3f}", 1),
            LineField(f"lr {self.learning_rate:.2e}", 2),
            LineField(rate(self.tokens_per_second), 3),
            *([] if self.mfu is None else [LineField(f"{self.mfu:.1%} MFU", 5)]),
            *(
                [LineField(f"{self.skipped_steps} skipped")]
                if self.skipped_steps
                else []
            ),
            *([LineField(f"{self.nan_steps} NaN")] if self.nan_steps else []),
            LineField(f"ETA {left}", 6),
        ]
        return fitted(parts, width)

    def fields(self) -> dict[str, Any]:
        """Plain values by name, for sinks."""
        return _flat(self)


@dataclass(frozen=True)
class EvalRecord(Record):
    """A finished evaluation. split: "validation" or "test"; metrics: as in `TrainRecord`.

    is_of_tokens: whether the loss is a mean over tokens, so that it has a perplexity
    """

    step: int
    samples: int
    split: str
    loss: float
    eval_seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_of_tokens: bool = True

    @property
    def kind(self) -> str:
        """The kind of the record in metrics.jsonl: its split."""
        return self.split

    @property
    def perplexity(self) -> float | None:
        """exp(loss), with the loss limited to 20 as in Megatron-LM; None for a loss of other things than tokens."""
        return math.exp(min(20.0, self.loss)) if self.is_of_tokens else None

    def line(self) -> str:
        """Megatron-LM's three lines."""
        metrics = "".join(
            f"{name} value: {mean:.6E} | "
            for name, mean in over_layers(self.metrics).items()
        )
        loss = f"lm loss value: {self.loss:.6E} | "
        if self.is_of_tokens:
            loss += f"lm loss PPL: {self.perplexity:.6E} | "
        text = (
            f" {self.split} loss at iteration {self.step} | {loss}{metrics}"
            f"evaluation time (s): {self.eval_seconds:.2f} | "
        )
        return "\n".join(("-" * len(text), text, "-" * len(text)))

    def short(self, width: int) -> str:
        """Return the fields that fit the width."""
        perplexity = self.perplexity
        parts = [
            LineField(f"{self.split} at step {self.step}"),
            LineField(f"loss {self.loss:.4f}"),
            *_parts_over_layers(self.metrics),
            *(
                []
                if perplexity is None
                else [LineField(f"perplexity {perplexity:.2f}", 1)]
            ),
            LineField(f"{self.eval_seconds:.2f} s", 5),
        ]
        return fitted(parts, width)

    def fields(self) -> dict[str, Any]:
        """Plain values by name, for sinks."""
        values = _flat(self)
        if values.pop("is_of_tokens"):
            values["perplexity"] = self.perplexity
        return values


class LineField(NamedTuple):
    """A field of a line for terminals. order: of those that are left out on a narrow one, the largest goes first; 0:
    always shown"""

    text: str
    order: int = 0


def fitted(parts: Sequence[LineField], width: int) -> str:
    """Return the parts in their order, without those that do not fit: of equal ones the last goes first."""
    shown = list(parts)
    while True:
        line = " | ".join(part.text for part in shown)
        least = max(range(len(shown)), key=lambda place: (shown[place].order, place))
        if len(line) <= width or not shown[least].order:
            return line
        del shown[least]


def clock(seconds: float) -> str:
    """Return a duration as bars show it: 04:37, 1:18:11."""
    from tqdm import tqdm

    return tqdm.format_interval(round(seconds))


def _parts_over_layers(metrics: Mapping[str, float]) -> list[LineField]:
    values = over_layers(metrics)
    return [LineField(f"{name} {mean:.4f}", 4) for name, mean in values.items()]


def over_layers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics for a line of text: of those of single layers, the largest over all layers.

    "decoder.layers.0 max load", "decoder.layers.1 max load", … become "largest max load". A metric in `LEAST`
    becomes "smallest …". The order is that of the first layer.
    """
    values: dict[str, list[float]] = {}
    for name, mean in metrics.items():
        kind = name
        if of_layer := OF_LAYER.fullmatch(name):
            extreme = "smallest" if of_layer[1] in LEAST else "largest"
            kind = f"{extreme} {of_layer[1]}"
        values.setdefault(kind, []).append(mean)
    return {
        kind: _extreme(means, -1 if kind.startswith("smallest ") else 1)
        for kind, means in values.items()
    }


def _known(form: str, value: float | None) -> list[str]:
    return [] if value is None else [form.format(value)]


def _extreme(values: Sequence[float], sign: int) -> float:
    """Return the largest, with sign -1 the smallest; NaN if any is."""
    return max(values, key=lambda x: math.inf if math.isnan(x) else sign * x)


def rate(tokens_per_second: float) -> str:
    """Tokens per second with three digits: 874 tok/s, 41.2k tok/s, 1.31M tok/s."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens_per_second >= size:
            return f"{tokens_per_second / size:.3g}{letter} tok/s"
    return f"{tokens_per_second:.0f} tok/s"


def _flat(record: TrainRecord | EvalRecord) -> dict[str, Any]:
    """Return the fields of the record, with each metric as a field: "sop loss" becomes sop_loss."""
    fields = asdict(record)
    for name in ("tags", "kept_title"):
        fields.pop(name, None)
    for name in (
        "num_zeros",
        "params_norm",
        "grad_noise_scale",
        "decoupled_learning_rate",
    ):
        if fields.get(name, 0) is None:
            del fields[name]
    fields |= {
        f"{name.replace('-', '_')}_seconds": max(seconds.values())
        for name, seconds in fields.pop("times", {}).items()
    }
    return fields | {
        name.replace(" ", "_"): mean for name, mean in fields.pop("metrics").items()
    }
