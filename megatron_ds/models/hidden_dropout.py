"""Dropout of hidden states, the same in every layout: a mask is a function of (seed, site, sample, position) alone."""

import torch

from ..data.batch import Batch
from ..ops.dropout import dropout
from .layer import Placement


class HiddenDropout:
    """Drops elements of x [s(/t), b, h] with probability `p` at one named site of the model; nothing when not training."""

    def __init__(self, p: float, site: str, placement: Placement):
        self.p, self.site, self.placement = p, site, placement

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        if not self.p or not batch.training:
            return x
        rows, picked = self.placement.rows(x), None
        if batch.places is not None:
            rows, picked = range(batch.places.length), batch.places.index[:, rows.start:rows.stop]
        return dropout(x, self.p, seed=self.placement.seed, site=self.site, sample_ids=batch.sample_ids, rows=rows,
                       picked=picked)
