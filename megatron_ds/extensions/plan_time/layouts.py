"""`RunLayout`: what a search may change of a run, and all layouts of a number of ranks.

A layout that the rules of the configuration refuse is not one. Nothing else is known here: neither time nor memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ...config import RunConfig, Source
from ...config.parse import check
from ...config.run import all_options
from ...errors import MegatronDSError
from ...planning.run_plan import RULES

SOURCE = Source("derived", "the search of layouts")
MICRO_BATCHES = (1, 2, 4, 8, 16)
RECOMPUTATION = (None, "selective", "full")
CHUNKS = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)

TENSOR = "parallel.tensor_model_parallel_size"
SEQUENCE = "parallel.sequence_parallel"
PIPELINE = "parallel.pipeline_model_parallel_size"
CONTEXT = "parallel.context_parallel_size"
EXPERT = "parallel.expert_model_parallel_size"
EXPERT_TENSOR = "parallel.expert_tensor_parallel_size"
LAYERS = "parallel.num_layers_per_virtual_pipeline_stage"
BATCH = "train.micro_batch_size"
RECOMPUTE = "train.recompute_granularity"
ZERO = "zero.stage"


@dataclass(frozen=True, order=True)
class RunLayout:
    """Ranks of each axis, stages of each pipeline rank, sequences of a micro-batch, recomputation and ZeRO."""

    tp: int
    pp: int
    chunks: int
    cp: int
    ep: int
    micro_batch: int
    recompute: str
    zero: int
    etp: int

    @property
    def record(self) -> tuple:
        """What the work of a layer depends on: neither its stage, nor the schedule, nor ZeRO."""
        return self.tp, self.cp, self.ep, self.etp, self.micro_batch, self.recompute

    def values(self, num_layers: int) -> dict[str, Any]:
        """Return path of an option → its value. num_layers: of the model"""
        found = {
            TENSOR: self.tp,
            SEQUENCE: self.tp > 1,
            PIPELINE: self.pp,
            CONTEXT: self.cp,
            EXPERT: self.ep,
            EXPERT_TENSOR: None if self.etp == self.tp else self.etp,
            BATCH: self.micro_batch,
            RECOMPUTE: self.recompute or None,
            ZERO: self.zero,
        }
        found[LAYERS] = (
            num_layers // self.pp // self.chunks if self.chunks > 1 else None
        )
        return found

    def flags(self, num_layers: int) -> str:
        """Return the flags of a command line."""
        options = all_options()
        words = []
        for path, value in self.values(num_layers).items():
            if value is None or value is False:
                continue
            words.append(options[path].flag)
            words += [] if value is True else [str(value)]
        return " ".join(words)


def layouts(
    config: RunConfig, ranks: int, devices_per_host: int
) -> Iterator[RunLayout]:
    """Yield the layouts of `ranks` ranks for a model. Tensor-parallel ranks are on one host."""
    model = config.model
    experts = max(model.experts, default=0) or 0
    for tp, pp, cp in product(
        _divisors(min(devices_per_host, ranks), ranks),
        _divisors(min(model.num_layers, ranks), ranks),
        _context_sizes(config, ranks),
    ):
        shared = tp * pp * cp
        if ranks % shared or model.num_attention_heads % tp:
            continue
        data = ranks // shared
        yield from _of_grid(config, tp, pp, cp, data, experts)


def _of_grid(
    config: RunConfig, tp: int, pp: int, cp: int, data: int, experts: int
) -> Iterator[RunLayout]:
    """Yield the layouts on a grid."""
    batch = config.train.global_batch_size or data
    for (etp, ep), micro_batch, chunks, recompute, zero in product(
        _of_experts(tp, data * cp, experts),
        MICRO_BATCHES,
        CHUNKS if pp > 1 else (1,),
        RECOMPUTATION,
        STAGES if data * cp > 1 else (0,),
    ):
        if batch % (data * micro_batch):
            continue
        count = batch // (data * micro_batch)
        if chunks > 1 and (count % pp or config.model.num_layers % (pp * chunks)):
            continue
        # Stages 2 and 3 send gradients and weights for each micro-batch of a pipeline.
        if zero > 1 and pp > 1:
            continue
        yield RunLayout(tp, pp, chunks, cp, ep, micro_batch, recompute or "", zero, etp)


def _of_experts(tp: int, data: int, experts: int) -> list[tuple[int, int]]:
    """(ranks that divide an expert, ranks that divide the experts): experts as dense layers are, or each whole.

    data: ranks that divide the batch and sequences
    """
    if not experts:
        return [(tp, 1)]
    found = []
    for etp in sorted({1, tp}):
        found += [(etp, ep) for ep in _divisors(experts, data * tp // etp)]
    return found


def _divisors(most: int, of: int) -> list[int]:
    return [n for n in range(1, most + 1) if of % n == 0]


def _context_sizes(config: RunConfig, ranks: int) -> list[int]:
    """Sizes at which each rank has some thousand tokens of a sequence."""
    length = config.model.seq_length
    return [
        n for n in (1, 2, 4, 8, 16) if n == 1 or length // n >= 4096 and ranks % n == 0
    ]


def with_layout(config: RunConfig, layout: RunLayout, ranks: int) -> RunConfig:
    """Return the configuration with a layout, which the rules may refuse."""
    values = {**layout.values(config.model.num_layers), "plan.world_size": ranks}
    return replace(config.with_values(values, SOURCE), world_size=ranks)


def is_accepted(config: RunConfig) -> bool:
    """Return whether the rules accept a configuration."""
    try:
        check(config, rules=RULES)
    except MegatronDSError:
        return False
    return True
