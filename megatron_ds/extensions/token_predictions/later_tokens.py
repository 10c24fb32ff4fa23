"""What stands k places later in the sequences of a batch: tokens, labels, and whether they count.

    position      0  1  2  3  4  5            of depth k = 1, which reads token i + 1 and predicts label i + 1
    token         a  b  E  c  d  e            E ends a document
    label         b  E  c  d  e  f
    reads         b  E  c  d  e  -
    predicts      E  c  d  e  f  -
    counts        1  1  0  1  1  0            position 2 would read a token of another document

A rank that holds some tokens of each sequence moves the whole sequences, and keeps its own places.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...batch.batch import Batch


@dataclass(frozen=True)
class LaterTokens:
    """What a depth reads and predicts at the places of a rank.

    tokens  int64 [b, s], read
    labels  int64 [b, s], predicted
    mask    float32 [b, s], 0 where the label does not count
    count   fp32 scalar: labels that count, also those at places of other ranks
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    count: torch.Tensor


def later_tokens(batch: Batch, distance: int) -> LaterTokens:
    """Return what stands `distance` places later. No collective."""
    whole = batch if batch.whole is None else batch.whole
    mask = _moved(whole.loss_mask.float(), distance)
    ids = whole.document_ids
    if ids is not None:
        mask = mask * (_moved(ids, distance) == ids)
    here = lambda t: t if batch.whole is None else _at_places(t, batch)
    return LaterTokens(
        here(_moved(whole.tokens, distance)),
        here(_moved(whole.labels, distance)),
        here(mask),
        mask.sum(),
    )


def _moved(t: torch.Tensor, distance: int) -> torch.Tensor:
    """t [b, s] → what stands `distance` places later, 0 behind the end."""
    return F.pad(t[:, distance:], (0, distance))


def _at_places(t: torch.Tensor, batch: Batch) -> torch.Tensor:
    assert batch.places is not None, "a part of a batch has the places of its tokens"
    return t.index_select(1, batch.places.index)
