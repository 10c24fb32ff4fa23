"""`Batch`: what a model sees of the data, and how it is cut.

Shapes: b samples, s positions. Batches are [b, s]; hidden states inside a model are [s, b, h].
"""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Places:
    """Where tokens stand of which only some are present.  index: int64 [b, k], ascending;  length: of the whole sequence."""

    index: torch.Tensor
    length: int


@dataclass(frozen=True)
class Batch:
    """Some samples of a global batch.

    tokens        int64 [b, s]
    labels        int64 [b, s], the next token of each position
    loss_mask     float32 [b, s], 1 where the position counts in the loss
    position_ids  int64 [b, s]
    sample_ids    b integers: the place of each sample in the whole run's stream (0, 1, 2, …). The same sample has the same
                  id under every layout, so anything random that is keyed by it is the same under every layout.
    training      False during evaluation and generation: nothing random happens
    rows_per_sample   how many rows each sample was folded into; row i belongs to the sample i // rows_per_sample
    attention_mask  None for plain causal attention, else bool [b, 1, s, s], True = may not attend
    kept_tokens   how many tokens of each sample the layers keep that drop some (models/random_ltd.py); None: all of them
    places        None where all tokens of the samples are here, as they are outside such a layer
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: tuple[int, ...]
    training: bool = True
    attention_mask: torch.Tensor | None = None
    rows_per_sample: int = 1
    kept_tokens: int | None = None
    places: Places | None = None

    @property
    def size(self) -> int:
        return self.tokens.shape[0]

    @property
    def seq_length(self) -> int:
        return self.tokens.shape[1]

    def split(self, micro_batch_size: int) -> tuple["Batch", ...]:
        """Consecutive micro-batches of `micro_batch_size` samples (views, no copies)."""
        rows = micro_batch_size * self.rows_per_sample
        return tuple(self._rows(i, i + rows) for i in range(0, self.size, rows))

    def to(self, device: torch.device) -> "Batch":
        move = lambda t: None if t is None else t.to(device, non_blocking=True)
        return self._map(move)

    def keeping(self, drop, step: int) -> "Batch":
        """This batch for a step of a run that drops tokens: a `TokenDrop`, or None."""
        return self if drop is None else replace(self, kept_tokens=drop.kept_at(step, self.seq_length))

    def at_places(self, index: torch.Tensor) -> "Batch":
        """Only the tokens at index [b, k], ascending: what a layer sees that is given no others. They keep their positions."""
        assert self.places is None, "tokens are dropped from a whole sequence only"
        tokens = self._map(lambda t: t if t is None or t.dim() != 2 else t.gather(1, index))
        mask = self.attention_mask
        if mask is not None:
            rows = index[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
            columns = index[:, None, None].expand(-1, mask.shape[1], index.shape[1], -1)
            mask = mask.gather(2, rows).gather(3, columns)
        return replace(tokens, attention_mask=mask, places=Places(index, self.seq_length))

    def _rows(self, start: int, stop: int) -> "Batch":
        rows = self._map(lambda t: None if t is None else t[start:stop])
        return replace(rows, sample_ids=self.sample_ids[start:stop])

    def _map(self, f) -> "Batch":
        return replace(self, tokens=f(self.tokens), labels=f(self.labels), loss_mask=f(self.loss_mask),
                       position_ids=f(self.position_ids), attention_mask=f(self.attention_mask))
