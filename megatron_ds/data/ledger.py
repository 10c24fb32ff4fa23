"""`Ledger`: the loss terms and metrics that layers add to the model's main loss.

A layer on any pipeline stage adds to the ledger of the batch that it is called with:

    batch.ledger.add("router z-loss", z.square().sum(), count=z.numel(), weight=1e-3)   trained, reported
    batch.ledger.record("tokens per expert", load.sum(), count=num_experts)             reported only

A loss term of one micro-batch is weight * value / count. It is scaled as the main loss is (loss scale, share
of the micro-batch in the global batch; with per-token losses the tokens of the micro-batch), and its backward
is part of the stage's own. The report of a step has the mean of a name, sum of values / sum of counts over
all micro-batches, layers and data-parallel ranks, without the weight.

A name that begins with the name of a layer, "decoder.layers.3 max load", is a metric of that layer. Log lines
have the largest over all layers ("largest max load", `training.records.over_layers`); metrics.jsonl and
TensorBoard have every layer.

`pipeline.stage.Stage` opens a ledger per micro-batch and closes it when the layers have returned. A closed
ledger ignores what is added: a forward that is recomputed in backward therefore counts once, and its first
run, whose graph the checkpoint keeps, is the one that is differentiated. Outside of a stage (`CLOSED`, the
default of a batch) nothing is collected.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One addition to a ledger.

    value   fp32 or fp64 scalar, the sum over `count` items; the same on every tensor-parallel rank
    weight  of value / count in the objective; None for a metric
    """

    name: str
    value: Tensor
    count: float | Tensor
    weight: float | None

    def gradient(self, scale: float, tokens: Tensor | None) -> Tensor:
        """Derivative of scale * objective by `value`.

        tokens: per-token losses weigh a micro-batch by its tokens.
        """
        gradient = torch.full_like(self.value, scale * self.weight)
        if tokens is not None:
            gradient = gradient * tokens
        return gradient / (self.count.clamp(min=1) if isinstance(self.count, Tensor) else max(self.count, 1))

    def detached(self) -> "Entry":
        """This entry, detached from the autograd graph."""
        count = self.count.detach() if isinstance(self.count, Tensor) else float(self.count)
        return Entry(self.name, self.value.detach(), count, self.weight)


class Ledger:
    """The entries of one micro-batch at one stage, in the order in which layers add them."""

    def __init__(self, is_open: bool = True):
        self.is_open = is_open
        self._entries: list[Entry] = []

    def add(self, name: str, value: Tensor, count: float | Tensor = 1, weight: float = 1.0) -> None:
        """Add weight * value / count to the objective of this micro-batch, and report the mean under `name`.

        value: scalar, fp32 or fp64, equal on all tensor-parallel ranks. Where a rank holds a slice (of the
        sequence, of the heads), sum it over the group first with `mpu.regions.reduce_from_region`.
        count: number of items that value sums, a detached tensor or a number; without any, 0 is added.
        """
        self._append(name, value, count, float(weight))

    def record(self, name: str, value: Tensor, count: float | Tensor = 1) -> None:
        """Report the mean of `value` / `count` under `name`; no gradient flows. Shapes as in `add`."""
        self._append(name, value.detach(), count, None)

    def take(self) -> list[Entry]:
        """The entries since the last call, with their graphs."""
        entries, self._entries = self._entries, []
        return entries

    def close(self) -> None:
        """Ignore all further additions."""
        self.is_open = False

    def _append(self, name: str, value: Tensor, count: float | Tensor, weight: float | None) -> None:
        if not self.is_open:
            return
        # No arithmetic here: a checkpointed layer must save the same tensors when it runs again on a
        # closed ledger.
        if value.dim() != 0 or value.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"ledger entry {name!r} is {list(value.shape)} {value.dtype}: it is summed with others and "
                "scaled by the loss scale. Add a scalar in torch.float32, for example values.float().sum()."
            )
        self._entries.append(Entry(name, value, count, weight))


CLOSED = Ledger(is_open=False)
