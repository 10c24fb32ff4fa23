"""`SiteSeeds`: the seeds of dropout in memory of the device, where kernels read them.

Seeds are hashed on the host and copied from page-locked memory, for which the host does not wait: once for a
micro-batch, by the first place of the model that asks. The other places copy nothing.
"""

import threading
from collections.abc import Sequence

import torch

from ....ops.dropout import sample_keys
from ....ops.keep_tables import seeds_on


class SiteSeeds(threading.local):
    """The seeds of the last samples, at the places that asked for seeds of these samples or of those before.

    Each thread has its own: ranks may be threads, and backward computes some layers again in a thread of autograd's.
    """

    def __init__(self):
        self._samples: tuple | None = None
        self._asked: dict[
            str, None
        ] = {}  # for these samples, in the order of the places
        self._rows: dict[str, torch.Tensor] = {}

    def on(
        self, device: torch.device, seed: int, site: str, sample_ids: Sequence[int]
    ) -> torch.Tensor:
        """int64 [b]: the seeds of b samples at a place in the model."""
        samples = device, seed, tuple(sample_ids)
        is_known = samples == self._samples
        if not is_known or site not in self._rows:
            sites = [*dict.fromkeys([*self._asked, site])]
            self._rows = _copied(device, seed, sites, sample_ids)
            self._samples = samples
        if not is_known:
            self._asked = {}
        self._asked[site] = None
        return self._rows[site]


def _copied(
    device: torch.device, seed: int, sites: Sequence[str], sample_ids: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the seeds of each place, int64 [b], in one tensor."""
    keys = []
    for site in sites:
        keys += sample_keys(seed, site, sample_ids)
    rows = seeds_on(device, keys).view(len(sites), -1)
    return dict(zip(sites, rows.unbind()))
