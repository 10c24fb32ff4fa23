"""Documents that share a sample: where each begins, which positions it may see, and how its positions count.

    tokens         a  b  E  c  d  e  E  f         E ends a document and belongs to it
    document_ids   0  0  0  1  1  1  1  2
    starts         0  0  0  3  3  3  3  7
    positions      0  1  2  0  1  2  3  0
"""

from functools import cached_property

import torch


def ids_of(ends: torch.Tensor) -> torch.Tensor:
    """`ends` bool [b, s], True at the last position of a document → the number of the document at each position."""
    numbers = ends.cumsum(1)
    return numbers - ends.long()


def starts_of(document_ids: torch.Tensor) -> torch.Tensor:
    """Where the document of each position begins, int64 [b, s]."""
    first = torch.zeros_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    here = torch.arange(document_ids.shape[1], device=document_ids.device)
    return torch.where(first, here, 0).cummax(1).values


def positions_of(document_ids: torch.Tensor) -> torch.Tensor:
    """Positions that count from the beginning of each document, int64 [b, s]."""
    return torch.arange(document_ids.shape[1], device=document_ids.device) - starts_of(document_ids)


class Documents:
    """What attention asks of the documents of a micro-batch. Each answer is made once and serves all layers.

    ids  int64 [b, s], not decreasing along a sample
    """

    def __init__(self, ids: torch.Tensor):
        self.ids = ids
        self._bias: dict[torch.dtype, torch.Tensor] = {}

    @cached_property
    def starts(self) -> torch.Tensor:
        return starts_of(self.ids)

    @cached_property
    def foreign(self) -> torch.Tensor:
        """bool [b, 1, s, s], True where the key belongs to another document than the query."""
        return (self.ids[:, :, None] != self.ids[:, None, :])[:, None]

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """[b, 1, s, s] to add to the scores: 0 for earlier positions of the same document and the own one, else -inf."""
        if dtype not in self._bias:
            closed = self.foreign | torch.ones_like(self.foreign[0, 0]).triu(1)
            self._bias[dtype] = torch.zeros_like(closed, dtype=dtype).masked_fill_(closed, -torch.inf)
        return self._bias[dtype]
