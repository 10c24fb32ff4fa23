"""What is to be seen of experts while layouts train: rows of each expert by sample, drops, margins.

`watched_experts()` observes the functions between router and dispatch in all threads of this process. A
micro-batch counts once, also where backward runs its layers again.
"""

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.config import parse
from megatron_ds.moe import capacity, mixture, router
from megatron_ds.mpu.context import ParallelContext
from tests.harness.layout_comparison import difference
from tests.harness.layout_runs import GLOBAL_BATCH, run_layout
from tests.harness.tiny_jobs import TOLERANCE, tiny_job

FEW = 5  # steps
MARGIN = 1e-6  # of choices, far above rounding in fp32
EXPERTS = "--num-experts 4 --moe-router-dtype fp64 --moe-aux-loss-coeff 0.02 --moe-ffn-hidden-size 48".split()


@dataclass
class ExpertsSeen:
    """Of all ranks of a run.

    chosen, kept    (layer, sample) → rows of each expert, before and after drops, without padding; a sample's
                    id is its place in the stream, so each step has other ids
    local_experts   how many experts ranks hold
    widths          of the experts' first weight on the ranks: local rows of an expert
    runs            how often a layer with experts ran, recomputation included, over all ranks
    choice_margin   smallest distance between the last expert that a token chose and the first that it did not
    drop_margin     smallest distance between weights of a kept and of a dropped row of one expert and sample
    """

    chosen: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    kept: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    local_experts: set[int] = field(default_factory=set)
    widths: set[int] = field(default_factory=set)
    runs: Counter = field(default_factory=Counter)
    choice_margin: float = float("inf")
    drop_margin: float = float("inf")

    @property
    def dropped(self) -> int:
        """Rows that no expert computed."""
        return int(
            sum(map(torch.sum, self.chosen.values()))
            - sum(map(torch.sum, self.kept.values()))
        )

    def loads(self) -> dict[tuple[str, int], tuple[int, ...]]:
        """`kept` as numbers, to compare."""
        return {key: tuple(rows.tolist()) for key, rows in self.kept.items()}

    def add(
        self, layer: str, batch: Batch, ctx: ParallelContext, before, routing
    ) -> None:
        """The slots of a micro-batch, from each rank that holds tokens of its own. before: without drops."""
        if not batch.ledger.is_open or ctx.tp.rank and not ctx.sequence_parallel:
            return
        experts, num = routing.experts, routing.scores.shape[1]
        b, k = batch.size, experts.shape[1]
        there, kept = (
            torch.ones_like(experts, dtype=torch.bool) if r.kept is None else r.kept
            for r in (before, routing)
        )
        for i, sample in enumerate(batch.sample_ids):
            of_sample = experts.view(-1, b, k)[:, i]
            for rows, mask in ((self.chosen, there), (self.kept, kept)):
                rows.setdefault((layer, sample), torch.zeros(num, dtype=torch.int64))
                rows[layer, sample] += of_sample[mask.view(-1, b, k)[:, i]].bincount(
                    minlength=num
                )

    def add_ranking(self, values: torch.Tensor, k: int) -> None:
        """A choice of k of the last dimension."""
        if k < values.shape[-1]:
            ordered = values.detach().sort(dim=-1, descending=True).values
            gap = ordered[..., k - 1] - ordered[..., k]
            finite = gap[gap.isfinite()]
            self.choice_margin = min(
                self.choice_margin, float(finite.min()) if len(finite) else float("inf")
            )

    def add_drops(
        self, experts: torch.Tensor, weights: torch.Tensor, keeps: torch.Tensor
    ) -> None:
        """Rows [b, s, k] that competed."""
        for expert in range(int(experts.max()) + 1):
            mine = experts == expert
            for i in range(len(experts)):
                kept, lost = (
                    weights[i][mine[i] & keeps[i]],
                    weights[i][mine[i] & ~keeps[i]],
                )
                # Tokens that begin documents alike are equal to the bit: the first is kept.
                if len(kept) and len(lost) and kept.min() != lost.max():
                    self.drop_margin = min(
                        self.drop_margin, float(kept.min() - lost.max())
                    )


@contextmanager
def watched_experts(margins: bool = False):
    """Yields the `ExpertsSeen` of the runs inside. margins: measure them, in a run of one process."""
    seen, here = ExpertsSeen(), threading.local()
    forward, limit = mixture.MixtureOfExperts.forward, mixture.limit
    largest, kept_slots = router.largest, capacity.kept_slots

    def watched_forward(self, x, batch):
        here.layer = self.name
        seen.runs[self.name] += 1
        first = self.experts.linear_fc1.weight
        seen.local_experts.add(first.shape[0])
        seen.widths.add(first.shape[1])
        return forward(self, x, batch)

    def watched_limit(before, *args):
        routing = limit(before, *args)
        batch, ctx = (
            next(a for a in args if isinstance(a, kind))
            for kind in (Batch, ParallelContext)
        )
        seen.add(here.layer, batch, ctx, before, routing)
        return routing

    def watched_largest(values, k):
        seen.add_ranking(values, k)
        return largest(values, k)

    def watched_kept(experts, weights, limits, *most):
        keeps = kept_slots(experts, weights, limits, *most)
        if limits.policy == "probs":
            seen.add_drops(experts, weights, keeps)
        return keeps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture.MixtureOfExperts, "forward", watched_forward)
        patch.setattr(mixture, "limit", watched_limit)
        if margins:
            patch.setattr(router, "largest", watched_largest)
            patch.setattr(capacity, "kept_slots", watched_kept)
        yield seen


# ------------------------------------------------------------------ short runs


def job_of(
    *flags, style="llama", dtype="fp32", layers=2, without=(), documents="joined"
):
    """Flags of a short job with four experts; initial weights in fp32 give choices wide margins."""
    job = tiny_job(style, dtype, True, 0.0, layers, GLOBAL_BATCH, FEW, documents)
    wide = ["--init-method-std", "0.1"] * (dtype == "fp32")
    return [*(flag for flag in job if flag not in without), *EXPERTS, *wide, *flags]


def model_of(job):
    """The model section of a job."""
    return parse([*job, "--micro-batch-size", "1"]).model


def train(job, layout, steps=FEW, margins=False):
    """(run, what its experts showed)."""
    with watched_experts(margins) as seen:
        run = run_layout(list(job), layout, steps)
    return run, seen


@cache
def _alone(job, steps, mbs):
    return train(job, f"mbs={mbs}", steps, margins=True)


def alone(job, steps=FEW, mbs=1):
    """The run of one process."""
    return _alone(tuple(job), steps, mbs)


def check_equal(job, layout, steps=FEW, dtype="fp32", same_loads=True):
    """Train under the layout and in one process; returns both runs' (run, seen)."""
    ours, reference = train(job, layout, steps), alone(job, steps)
    if dtype == "fp32":
        assert min(reference[1].choice_margin, reference[1].drop_margin) > MARGIN, (
            "choose another --seed"
        )
    found = difference(ours[0].merged, reference[0].merged, ours[0].model)
    assert found.is_within(TOLERANCE[dtype]), found
    assert not same_loads or ours[1].loads() == reference[1].loads()
    return ours, reference
