"""Documents that share a sample and are kept apart."""

from functools import cached_property, lru_cache

import torch

from ..host.valueless_tensor import ValuelessTensor

# The positions at which the documents of each sample begin, ascending, without the first position.
Boundaries = tuple[tuple[int, ...], ...]


def document_numbers(ends: torch.Tensor) -> torch.Tensor:
    """Return the document at each position, int64 [b, s].  ends: bool [b, s], True where a document ends."""
    numbers = ends.cumsum(1)
    # An end belongs to its own document, so it counts from the next position on.
    return numbers - ends.long()


def document_starts(document_ids: torch.Tensor) -> torch.Tensor:
    """Return where the document of each position begins, int64 [b, s]."""
    first = torch.zeros_like(document_ids, dtype=torch.bool)
    first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    here = torch.arange(document_ids.shape[1], device=document_ids.device)
    # The last beginning at or before each position.
    begins = torch.where(first, here, 0)
    return begins.cummax(1).values


def document_positions(document_ids: torch.Tensor) -> torch.Tensor:
    """Return the positions that count from the beginning of each document, int64 [b, s]."""
    here = torch.arange(document_ids.shape[1], device=document_ids.device)
    return here - document_starts(document_ids)


def boundaries_of(document_ids: torch.Tensor) -> Boundaries:
    """Return the positions at which documents begin in each sample.  document_ids: int64 [b, s] on the CPU."""
    begins = document_ids[:, 1:] != document_ids[:, :-1]
    # Column i of `begins` compares positions i and i + 1.
    positions = (row.nonzero()[:, 0] + 1 for row in begins)
    return tuple(tuple(row.tolist()) for row in positions)


def cut_boundaries(boundaries: Boundaries, length: int, count: int = 1) -> Boundaries:
    """Return the boundaries of rows: each sample is cut into rows of `length` positions, of which `count` are
    kept."""
    rows = []
    for sample in boundaries:
        for first in range(0, count * length, length):
            # A row begins with a document anyway, so its first position is no boundary.
            inside = [at for at in sample if first < at < first + length]
            rows.append(tuple(at - first for at in inside))
    return tuple(rows)


class Documents:
    """The documents of a micro-batch, for attention; made once for all layers.

        tokens         a  b  E  c  d  e  E  f         E ends a document and belongs to it
        document_ids   0  0  0  1  1  1  1  2
        positions      0  1  2  0  1  2  3  0

    ids         int64 [b, s], not decreasing along a sample
    boundaries  if they are known already
    """

    def __init__(self, ids: torch.Tensor, boundaries: Boundaries | None = None):
        self.ids = ids
        self._boundaries = boundaries

    @cached_property
    def boundaries(self) -> Boundaries | None:
        """Where documents begin; None if the ids would have to be read from a device, or have no values."""
        if self._boundaries is not None:
            return self._boundaries
        is_on_cpu = self.ids.device.type == "cpu"
        is_fake = isinstance(self.ids, ValuelessTensor)
        if is_fake or not is_on_cpu:
            return None
        return boundaries_of(self.ids)

    @property
    def foreign(self) -> torch.Tensor:
        """bool [b, 1, s, s], True where the key belongs to another document than the query."""
        return _foreign(self)

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [b, 1, s, s] to add to the scores: 0 for earlier positions of its document, else -inf."""
        return _bias(self, dtype)


def _differ(ids: torch.Tensor) -> torch.Tensor:
    """Return bool [b, 1, s, s], rows for queries.  ids: int64 [b, s]"""
    of_queries = ids[:, None, :, None]
    of_keys = ids[:, None, None, :]
    return of_queries != of_keys


# These are squares of the sequence, and the micro-batches of a step live as long as the step, so only the
# last ones are kept: one is used in forward while another is in backward, each perhaps with two sets of
# positions.
@lru_cache(maxsize=4)
def _foreign(documents: Documents) -> torch.Tensor:
    return _differ(documents.ids)


@lru_cache(maxsize=4)
def _bias(documents: Documents, dtype: torch.dtype) -> torch.Tensor:
    closed = _differ(documents.ids)
    closed |= torch.ones_like(closed[0, 0]).triu(1)  # later tokens
    bias = torch.zeros_like(closed, dtype=dtype)
    return bias.masked_fill_(closed, -torch.inf)
