"""`Batch`: what a model sees of the data, and how it is cut.

Shapes: b samples, s positions. Batches are [b, s]; hidden states inside a model are [s, b, h].
"""

from dataclasses import dataclass, replace

import torch


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
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: tuple[int, ...]
    training: bool = True
    attention_mask: torch.Tensor | None = None
    rows_per_sample: int = 1

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

    def _rows(self, start: int, stop: int) -> "Batch":
        rows = self._map(lambda t: None if t is None else t[start:stop])
        return replace(rows, sample_ids=self.sample_ids[start:stop])

    def _map(self, f) -> "Batch":
        return replace(self, tokens=f(self.tokens), labels=f(self.labels), loss_mask=f(self.loss_mask),
                       position_ids=f(self.position_ids), attention_mask=f(self.attention_mask))
