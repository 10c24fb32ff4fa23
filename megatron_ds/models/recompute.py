"""Activation recomputation: forget what a function saved for backward, run it again when backward comes.

Two sizes, as in Korthikanti et al. 2022 (arXiv:2205.05198, section 5): "full" forgets a whole block and keeps its input
[s, b, h]; "selective" forgets the core attention only, whose scores grow with s² and cost little to compute again.
No random state is kept or restored: dropout masks are pure functions of (seed, site, sample), so the second run draws the
same ones. Collectives inside are run again too, by every rank of the group in the same order.
"""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from ..errors import ConfigError

GRANULARITIES = (None, "selective", "full")


def recompute(function: Callable, *args):
    """`function(*args)`, saving only `args`; where no gradient is wanted there is nothing to forget."""
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def check_granularity(granularity: str | None) -> str | None:
    if granularity not in GRANULARITIES:
        raise ConfigError(f"recompute_granularity={granularity!r} is not known: use 'full', 'selective' or none.")
    return granularity
