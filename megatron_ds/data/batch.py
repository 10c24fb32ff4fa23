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
    attention_mask  None for plain causal attention, else bool [b, 1, s or 1, s], True = may not attend
    token_types  int64 [b, s], which segment a token belongs to, for models that have such embeddings
    sentence_order  int64 [b], 1 where the segments of the sample are swapped; -1 counts in no loss
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    sample_ids: tuple[int, ...]
    training: bool = True
    attention_mask: torch.Tensor | None = None
    token_types: torch.Tensor | None = None
    sentence_order: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return self.tokens.shape[0]

    @property
    def seq_length(self) -> int:
        return self.tokens.shape[1]

    def split(self, micro_batch_size: int) -> tuple["Batch", ...]:
        """Consecutive micro-batches of `micro_batch_size` samples (views, no copies)."""
        return tuple(self._rows(i, i + micro_batch_size) for i in range(0, self.size, micro_batch_size))

    def to(self, device: torch.device) -> "Batch":
        move = lambda t: None if t is None else t.to(device, non_blocking=True)
        return self._map(move)

    def _rows(self, start: int, stop: int) -> "Batch":
        rows = self._map(lambda t: None if t is None else t[start:stop])
        return replace(rows, sample_ids=self.sample_ids[start:stop])

    def _map(self, f) -> "Batch":
        return replace(self, tokens=f(self.tokens), labels=f(self.labels), loss_mask=f(self.loss_mask),
                       position_ids=f(self.position_ids), attention_mask=f(self.attention_mask),
                       token_types=f(self.token_types), sentence_order=f(self.sentence_order))
