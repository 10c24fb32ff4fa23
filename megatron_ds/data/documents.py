"""Documents that share a sample: where each begins, which positions it may see, and how its positions count.

    tokens         a  b  E  c  d  e  E  f         E ends a document and belongs to it
    document_ids   0  0  0  1  1  1  1  2
    starts         0  0  0  3  3  3  3  7
    positions      0  1  2  0  1  2  3  0
"""

from functools import cached_property, lru_cache

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
    """What attention asks of the documents of a micro-batch, made once for all layers.

    ids  int64 [b, s], not decreasing along a sample
    """

    def __init__(self, ids: torch.Tensor):
        self.ids = ids

    @cached_property
    def starts(self) -> torch.Tensor:
        return starts_of(self.ids)

    @property
    def foreign(self) -> torch.Tensor:
        """bool [b, 1, s, s], True where the key belongs to another document than the query."""
        return _foreign(self)

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """[b, 1, s, s] to add to the scores: 0 for earlier positions of the same document and the own one, else -inf."""
        return _bias(self, dtype)


# Squares of the sequence: only those used last are kept, since the micro-batches of a step live as long as the step. One is
# used in forward while another is in backward, each perhaps with two sets of positions.
@lru_cache(maxsize=4)
def _foreign(documents: Documents) -> torch.Tensor:
    return (documents.ids[:, :, None] != documents.ids[:, None, :])[:, None]


@lru_cache(maxsize=4)
def _bias(documents: Documents, dtype: torch.dtype) -> torch.Tensor:
    closed = (documents.ids[:, :, None] != documents.ids[:, None, :])[:, None]
    closed |= torch.ones_like(closed[0, 0]).triu(1)
    return torch.zeros_like(closed, dtype=dtype).masked_fill_(closed, -torch.inf)
