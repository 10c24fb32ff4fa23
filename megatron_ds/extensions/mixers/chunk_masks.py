"""`ChunkMasks`: where the state of a scan may pass, of sequences that are cut into chunks and hold documents."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class ChunkMasks:
    """The masks of b sequences in c chunks of C tokens. Each has two dimensions of size 1, for groups and their heads.

    within   bool [b, 1, 1, c, C, C], True where a token (row) reads another one of its chunk: itself and earlier ones
             of its document
    reads    [b, 1, 1, c, C, 1], 1 where a token belongs to the document in which the chunk before ends, else 0
    writes   [b, 1, 1, c, C, 1], 1 where a token belongs to the document in which its chunk ends
    passes   [b, 1, 1, c, 1, 1], 1 where one document reaches from the chunk before to the end of this one

    Without documents the last three are 1.
    """

    within: torch.Tensor
    reads: torch.Tensor | float = 1.0
    writes: torch.Tensor | float = 1.0
    passes: torch.Tensor | float = 1.0


def chunk_masks(
    documents: torch.Tensor | None,
    chunk: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ChunkMasks:
    """Return the masks of sequences whose tokens have these documents.

    documents: int64 [b, s], not decreasing; None: all tokens of a sequence belong to one. Nothing is read by the
    host. Tokens that fill the last chunk belong to its last document: nothing reads them.
    """
    earlier = torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril()
    if documents is None:
        return ChunkMasks(earlier)
    # Documents of tokens [b, c, C], of the end of each chunk and of the chunk before it [b, c, 1].
    missing = -documents.shape[1] % chunk
    last = documents[:, -1:].expand(-1, missing)
    filled = torch.cat((documents, last), 1)
    ids = filled.unflatten(1, (-1, chunk))
    end = ids[..., -1:]
    before = F.pad(end[:, :-1], (0, 0, 1, 0), value=-1)
    # Documents do not decrease, so that equal ends mean one document in between.
    is_same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    within = earlier & is_same
    return ChunkMasks(
        within[:, None, None],
        reads=_factors(ids == before, dtype),
        writes=_factors(ids == end, dtype),
        passes=_factors(before == end, dtype),
    )


def _factors(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 1 where a mask [b, c, ..] is True, else 0, as [b, 1, 1, c, .., 1]."""
    numbers = mask.to(dtype)
    return numbers[:, None, None, ..., None]
