"""`Batch`: the input of a model, its micro-batches, and the documents that share a sample.

Shapes: b samples, s positions. Batches are [b, s]; hidden states inside a model are [s, b, h].
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..mpu.context import SequenceSlice
from .documents import Boundaries, Documents
from .ledger import NO_LEDGER, Ledger
from .past import Past

if TYPE_CHECKING:
    from ..progress.kept_tokens import KeptTokens


@dataclass(frozen=True)
class Places:
    """Positions of tokens of which a batch holds only some.

    index   int64, ascending: [k], the same for all samples, or [b, k]
    length  of the whole sequence
    """

    index: torch.Tensor
    length: int


@dataclass(frozen=True)
class Batch:
    """Some samples of a global batch.

    tokens        int64 [b, s]
    labels        int64 [b, s], the next token of each position
    loss_mask     float32 [b, s], 1 where the position counts in the loss
    position_ids  int64 [b, s]
    sample_ids    b integers: the position of each sample in the stream of the run (0, 1, 2, …). The same
                  sample has the same id under every layout, so random numbers that are keyed by it do not
                  depend on the layout.
    training      False during evaluation and generation: no dropout
    rows_per_sample   number of rows that each sample was folded into; row i belongs to sample i //
                      rows_per_sample
    attention_mask  None for plain causal attention, else bool [b, 1, s or 1, s], True = may not attend
    document_ids    int64 [b, s], not decreasing: a position attends to positions of its own document only.
                    None: all positions of a sample may attend to each other
    boundaries    where the documents of `document_ids` begin, known on the host although the ids are on a
                  GPU; None: they are read from the ids if these are on the CPU, else unknown
    token_types     int64 [b, s], the segment of each token, for models with segment embeddings
    sentence_order  int64 [b], 1 where the segments of the sample are swapped; -1 does not count in the loss
    reference     what another model predicts, as an objective keeps it. Of pairs of answers float32
                  [b, 1, 2], the logarithm of the probability that it gives to each of the two
    kept_tokens   tokens of each sample that a layer keeps which drops some; None: all of
                  them
    places        positions of the tokens where only some are present: inside such a layer, or under context
                  parallelism; None where all tokens are present
    whole         under context parallelism the batch of all tokens, of which this one has those of the rank
    past          of generated text: keys and values of earlier tokens, which attention layers extend
    ledger        where layers add loss terms and metrics; outside of a pipeline stage there is none, and an
                  addition is an error
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: tuple[int, ...]
    training: bool = True
    attention_mask: torch.Tensor | None = None
    rows_per_sample: int = 1
    document_ids: torch.Tensor | None = None
    boundaries: Boundaries | None = None
    token_types: torch.Tensor | None = None
    sentence_order: torch.Tensor | None = None
    reference: Any = None
    kept_tokens: int | None = None
    places: Places | None = None
    whole: "Batch | None" = None
    past: Past | None = None
    ledger: Ledger = NO_LEDGER

    @property
    def size(self) -> int:
        """Rows of the batch."""
        return self.tokens.shape[0]

    @property
    def seq_length(self) -> int:
        """Tokens of each row that this batch holds."""
        return self.tokens.shape[1]

    @property
    def whole_length(self) -> int:
        """Tokens of each sequence, whether this batch holds all of them or some."""
        return self.seq_length if self.places is None else self.places.length

    def split(self, micro_batch_size: int) -> tuple["Batch", ...]:
        """Return consecutive micro-batches of `micro_batch_size` samples (views, no copies)."""
        rows = micro_batch_size * self.rows_per_sample
        return tuple(self._rows(i, i + rows) for i in range(0, self.size, rows))

    @cached_property
    def documents(self) -> Documents | None:
        """`document_ids` as attention needs them, made once for all layers."""
        return (
            None
            if self.document_ids is None
            else Documents(self.document_ids, self.boundaries)
        )

    @property
    def padding(self) -> torch.Tensor | None:
        """bool [b, s], True where no position may attend to the token; None if the batch has no padding."""
        mask = self.attention_mask
        return mask[:, 0, 0] if mask is not None and mask.shape[2] == 1 else None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields that are tensors [b, …], by name."""
        return {
            f.name: t
            for f in fields(self)
            if isinstance(t := getattr(self, f.name), torch.Tensor)
        }

    def to(self, device: torch.device) -> "Batch":
        """Return a copy on the device; asynchronous from page-locked memory. Attention cannot read document ids on a
        GPU without waiting for it, so their boundaries are noted before."""
        moved = self._map(lambda t: t.to(device, non_blocking=True))
        if self.documents is None or device.type == "cpu":
            return moved
        return replace(moved, boundaries=self.documents.boundaries)

    def pin(self) -> "Batch":
        """Return a copy in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(torch.Tensor.pin_memory)

    def keeping(self, kept: "KeptTokens | None", step: int) -> "Batch":
        """Return this batch with the `kept_tokens` of a step; the batch itself if all are kept."""
        return (
            self
            if kept is None
            else replace(self, kept_tokens=kept.kept_at(step, self.seq_length))
        )

    @property
    def is_narrowed(self) -> bool:
        """Whether each sample holds tokens of its own choice, as inside a layer that drops tokens."""
        return self.places is not None and self.places.index.dim() == 2

    def positions(self, rows: range | None = None) -> tuple[range, torch.Tensor | None]:
        """Positions, in the whole sequences, of the tokens in `rows` (None: all rows); for `ops.dropout`.

        Returns (rows, None) if the batch holds whole sequences. Otherwise it returns the range of all
        positions of a sequence, and int64 [b, k] with the positions of the k tokens of each sample.
        """
        rows = range(self.seq_length) if rows is None else rows
        if self.places is None:
            return rows, None
        return range(self.places.length), self.places.index[
            ..., rows.start : rows.stop
        ].expand(self.size, -1)

    def cut(self, part: SequenceSlice) -> "Batch":
        """Return the tokens that this rank holds of each sequence under context parallelism; without it, this batch.

        The order of the segments is predicted from the first token, so it counts on the first rank alone.
        """
        index = part.index(self.seq_length, self.tokens.device)
        if index is None:
            return self
        order = self.sentence_order
        if order is not None and part.context.rank > 0:
            order = torch.full_like(order, -1)
        return replace(self.at_places(index), sentence_order=order, whole=self)

    @property
    def counted_tokens(self) -> torch.Tensor:
        """fp32 scalar: number of tokens that count in the loss, also those that other ranks hold."""
        return self.counted_by_sequence.sum()

    @property
    def counted_by_sequence(self) -> torch.Tensor:
        """fp32 [b], the same for each sequence."""
        return (
            (self.loss_mask if self.whole is None else self.whole.loss_mask)
            .float()
            .sum(1)
        )

    def keep(self, index: torch.Tensor, part: SequenceSlice) -> "Batch":
        """Return the tokens at index [b, k] of the whole sequences, ascending, as far as this rank holds them."""
        whole = self if self.whole is None else replace(self.whole, ledger=self.ledger)
        return whole.at_places(index).cut(part)

    def with_ledger(self, ledger: Ledger) -> "Batch":
        """Return this batch for one stage. `documents` is made once for all stages of a rank."""
        _ = self.documents  # cached before the copy, so all stages share it
        batch = copy.copy(self)
        object.__setattr__(batch, "ledger", ledger)
        return batch

    def at_places(self, index: torch.Tensor) -> "Batch":
        """Return only the tokens at index [k] or [b, k], ascending, among those that this batch holds.

        Tokens keep their positions. A batch that holds some of the tokens already is narrowed further.
        """
        kept: dict[str, Any] = {
            name: _picked(t, index)
            for name, t in self.tensors().items()
            if t.dim() == 2
        }
        places = Places(index, self.seq_length)
        if self.places is not None:
            places = Places(
                _picked(self.places.index.expand(self.size, -1), index),
                self.places.length,
            )
        index = index.expand(self.size, -1)
        mask = self.attention_mask
        if mask is not None:
            columns = index[:, None, None].expand(-1, mask.shape[1], mask.shape[2], -1)
            kept["attention_mask"] = mask = mask.gather(3, columns)  # [b, n, s or 1, k]
            if mask.shape[2] > 1:
                rows = index[:, None, :, None].expand(
                    -1, mask.shape[1], -1, mask.shape[3]
                )
                kept["attention_mask"] = mask.gather(2, rows)  # [b, n, k, k]
        return replace(self, **kept, places=places, boundaries=None)

    def _rows(self, start: int, stop: int) -> "Batch":
        rows: dict[str, Any] = {
            name: t[start:stop] for name, t in self.tensors().items()
        }
        whole = None if self.whole is None else self.whole._rows(start, stop)
        boundaries = None if self.boundaries is None else self.boundaries[start:stop]
        return replace(
            self,
            **rows,
            sample_ids=self.sample_ids[start:stop],
            whole=whole,
            boundaries=boundaries,
        )

    def _map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Move each tensor. A row that is expanded over samples (stride 0) stays so."""

        def moved(t: torch.Tensor) -> torch.Tensor:
            return (
                move(t[:1]).expand_as(t)
                if t.shape[0] > 1 and t.stride(0) == 0
                else move(t)
            )

        whole = None if self.whole is None else self.whole._map(move)
        tensors: dict[str, Any] = {name: moved(t) for name, t in self.tensors().items()}
        return replace(self, **tensors, whole=whole)


def _picked(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """t [b, s] at index [k] or [b, k].

    A row that is expanded over all samples (stride 0) stays so if the index is the same for all of them.
    """
    if index.dim() == 2:
        return t.gather(1, index)
    if t.shape[0] > 1 and t.stride(0) == 0:
        return t[:1].index_select(1, index).expand(t.shape[0], -1)
    return t.index_select(1, index)
