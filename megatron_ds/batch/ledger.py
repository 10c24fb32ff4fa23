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
ledger ignores what it has had already: a forward that is recomputed in backward therefore counts once, and
its first run, whose graph the checkpoint keeps, is the one that is differentiated.

    Ledger()      open: collects; closed: ignores names that it has, refuses others
    DISCARDING    ignores everything, where only outputs of layers are wanted: generation, timings
    NO_LEDGER     refuses everything: the default of a batch, so that no addition is lost by an omission
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import LedgerError


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
        """Return the derivative of scale * objective by `value`.

        tokens: per-token losses weigh a micro-batch by its tokens.
        """
        assert self.weight is not None, "a metric is no part of the objective"
        gradient = torch.full_like(self.value, scale * self.weight)
        if tokens is not None:
            gradient = gradient * tokens
        return gradient / (
            self.count.clamp(min=1)
            if isinstance(self.count, Tensor)
            else max(self.count, 1)
        )

    def detached(self) -> "Entry":
        """Return this entry, detached from the autograd graph."""
        count = (
            self.count.detach() if isinstance(self.count, Tensor) else float(self.count)
        )
        return Entry(self.name, self.value.detach(), count, self.weight)


class Ledger:
    """The entries of one micro-batch at one stage, in the order in which layers add them.

    is_open  whether it collects; False for a layer that backward runs again, and where entries are discarded
    tokens   with per-token losses: [b], the tokens of each sequence that count in the loss. A micro-batch
             weighs as many as it has, so a term that is a mean over sequences must weigh each by its own.
             None: micro-batches weigh the same
    """

    def __init__(self, tokens: Tensor | None = None) -> None:
        self.is_open = True
        self.tokens = tokens
        self._entries: list[Entry] = []
        self._names: set[str] = set()

    def add(
        self, name: str, value: Tensor, count: float | Tensor = 1, weight: float = 1.0
    ) -> None:
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
        """Return the entries since the last call, with their graphs."""
        entries = self._entries
        self._entries = []
        return entries

    def close(self) -> None:
        """Close the ledger. Layers that run again may add the same names, which are ignored; other names are
        refused."""
        self.is_open = False

    def _append(
        self, name: str, value: Tensor, count: float | Tensor, weight: float | None
    ) -> None:
        if not self.is_open:
            self._ignore(name)
            return
        # No arithmetic here: a checkpointed layer must save the same tensors when it runs again on a
        # closed ledger.
        if value.dim() != 0 or value.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"ledger entry {name!r} is {list(value.shape)} {value.dtype}: it is summed with others and "
                "scaled by the loss scale. Add a scalar in torch.float32, for example values.float().sum()."
            )
        self._names.add(name)
        self._entries.append(Entry(name, value, count, weight))

    def _ignore(self, name: str) -> None:
        """Raises LedgerError for a name that the ledger did not have when it was open."""
        if name not in self._names:
            raise LedgerError(
                f"{name!r} is added to a ledger that was closed without it, so it would be lost: neither "
                "trained nor reported. A layer adds the same names in its first forward as when it is "
                "recomputed; close the ledger after all layers and the loss have returned."
            )


class _Discarding(Ledger):
    """Ignores all additions."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False

    def _ignore(self, name: str) -> None:
        pass


class _NoLedger(_Discarding):
    """Refuses all additions."""

    def _ignore(self, name: str) -> None:
        raise LedgerError(
            f"{name!r} is added to a batch that has no ledger, so it would be lost: neither trained nor "
            "reported. Give the layers batch.with_ledger(ledger), a new Ledger of megatron_ds.batch.ledger "
            "for each micro-batch, and call ledger.close() after them; or, of the same module, "
            "batch.with_ledger(DISCARDING) where only the outputs of the layers are wanted."
        )


DISCARDING = _Discarding()
NO_LEDGER = _NoLedger()
