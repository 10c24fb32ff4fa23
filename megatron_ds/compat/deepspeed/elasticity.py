"""DeepSpeed's elastic batch size: one that as many numbers of GPUs as possible divide, and these numbers.

    "elasticity": {"enabled": true, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6],
                   "min_gpus": 1, "max_gpus": 10000, "prefer_larger_batch": true, "version": 0.2}

A batch size is a micro-batch size, or the least common multiple of all, times the largest highly composite number
that keeps it within the maximum. Version 0.1 counts GPUs. Version 0.2 counts nodes of `num_gpus_per_node` GPUs, of
which `model_parallel_size` have one replica.
"""

import math
import os
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError

# Numbers with more divisors than any smaller one, OEIS A002182.
HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
FIRST_VERSION = (0, 3, 8)  # of DeepSpeed with elasticity
SECTION = "elasticity"


class ElasticityError(ConfigError):
    """An elastic configuration that cannot be used."""


class ElasticityConfigError(ElasticityError):
    """A value of the section is missing or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The world size is none of the valid ones."""


@dataclass(frozen=True)
class ElasticSettings:
    """The values of the section, checked."""

    max_batch: int
    micro_batches: tuple[int, ...]
    min_gpus: int
    max_gpus: int
    model_parallel: int
    gpus_per_node: int
    version: float
    prefers_larger: bool


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the section is there and switched on."""
    return bool(ds_config.get(SECTION, {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "0.18.0",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple:
    """(batch size, valid world sizes), and the micro-batch size if `world_size` or `return_microbatch` is given.

    world_size: in GPUs; version 0.2 needs it, by default from the environment. The valid sizes are those of the data-
    parallel group. Raises ElasticityConfigError for wrong values, ElasticityIncompatibleWorldSize for a world size
    that is not valid.
    """
    settings = _settings(ds_config)
    _check_version(target_deepspeed_version)
    # Version 0.2 depends on the number of GPUs.
    if settings.version == 0.1:
        batch, sizes = _by_gpus(
            settings, settings.max_batch, settings.min_gpus, settings.max_gpus
        )
        micro_batch = None
    else:
        batch, sizes, micro_batch = _by_nodes(settings, world_size or _size_around())
    if world_size == 0 and not return_microbatch:
        return batch, sizes
    # The micro-batch size of a world size.
    if world_size == 0 and settings.version == 0.1:
        raise ElasticityConfigError(
            "return_microbatch needs world_size: the micro-batch size depends on it. Give both."
        )
    if world_size == 0:
        return batch, sizes, micro_batch
    if world_size not in (sizes or ()):
        raise ElasticityIncompatibleWorldSize(
            f"world size {world_size} is not valid for the elastic batch size {batch}. Valid are {sizes}."
        )
    largest_first = sorted(settings.micro_batches, reverse=True)
    share = batch // world_size
    fits = [size for size in largest_first if share % size == 0]
    if not fits:
        raise ElasticityError(
            f"no micro-batch size of {list(settings.micro_batches)} divides {share}, the share of each of "
            f"{world_size} GPUs in a batch of {batch}. Add one that does."
        )
    return batch, sizes, fits[0]


def _by_gpus(
    settings: ElasticSettings, max_batch: int, least: int, most: int
) -> tuple[int, list[int] | None]:
    """(batch size, the numbers of GPUs that divide it into micro-batches) of version 0.1."""
    micro_batches = settings.micro_batches
    most = most or max_batch // min(micro_batches)
    if max(micro_batches) > max_batch:
        raise ElasticityConfigError(
            f"micro_batch_sizes {list(micro_batches)} have one above the largest batch size {max_batch}. Remove it, "
            "or raise max_train_batch_size."
        )
    bases = {*micro_batches, math.lcm(*micro_batches)}
    batches = {_scaled(base, max_batch) for base in bases}
    best = min(micro_batches)
    sizes: list[int] | None = None
    for batch in sorted(batches, reverse=settings.prefers_larger):
        found = _world_sizes(batch, micro_batches, max(least, 1), most)
        if len(found) > len(sizes or ()):
            best = batch
            sizes = found
    # Where no number of GPUs is valid, a larger batch size is still preferred.
    if sizes is None and settings.prefers_larger and max(batches) > best:
        return max(batches), []
    return best, sizes


def _by_nodes(
    settings: ElasticSettings, world_size: int
) -> tuple[int, list[int], int | None]:
    """(batch size, valid data-parallel sizes, micro-batch size) of version 0.2."""
    per_node = settings.gpus_per_node
    if per_node % settings.model_parallel:
        raise ElasticityError(
            f"num_gpus_per_node {per_node} is not a multiple of model_parallel_size {settings.model_parallel}: "
            "a replica is within one node. Change one of them."
        )
    replicas = per_node // settings.model_parallel  # of a node
    batch, nodes = _by_gpus(
        settings,
        settings.max_batch // replicas,
        settings.min_gpus // per_node,
        settings.max_gpus // per_node,
    )
    if nodes is None:
        raise ElasticityError(
            f"no number of nodes of {per_node} GPUs is valid for a batch of at most {settings.max_batch}, "
            f"micro_batch_sizes {list(settings.micro_batches)} and {settings.min_gpus} to {settings.max_gpus} GPUs. "
            "Raise max_train_batch_size, or lower min_gpus."
        )
    batch *= replicas
    sizes = [count * replicas for count in nodes]
    if world_size // settings.model_parallel in sizes:
        return batch, sizes, _micro_batch(settings, batch, world_size)
    # Another number of GPUs: the largest batch size that it can have.
    share = world_size / per_node * replicas
    batches = [
        math.floor(settings.max_batch / (micro_batch * share)) * micro_batch * share
        for micro_batch in settings.micro_batches
    ]
    batch = int(max(batches) if settings.prefers_larger else min(batches))
    return batch, [int(share)], _micro_batch(settings, batch, world_size)


def _scaled(base: int, max_batch: int) -> int:
    """Return the base times the largest highly composite number that keeps it within the maximum."""
    if base >= max_batch:
        return base
    return (
        base * HIGHLY_COMPOSITE[bisect_right(HIGHLY_COMPOSITE, max_batch // base) - 1]
    )


def _world_sizes(
    batch: int, micro_batches: Sequence[int], least: int, most: int
) -> list[int]:
    """Return the numbers of GPUs within the bounds that divide a batch into whole micro-batches, ascending."""
    found: set[int] = set()
    for parts in (batch // size for size in micro_batches if batch % size == 0):
        found.update(
            count for count in range(least, min(most, parts) + 1) if parts % count == 0
        )
    return sorted(found)


def _micro_batch(
    settings: ElasticSettings, batch: float, world_size: int
) -> int | None:
    """Return the first micro-batch size that divides the share of a GPU, or the largest; None for none."""
    fits = [size for size in settings.micro_batches if batch // world_size % size == 0]
    if not fits:
        return None
    return max(fits) if settings.prefers_larger else fits[0]


def _size_around() -> int:
    """Return the world size of the environment. Raises ElasticityConfigError without one."""
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdigit():
        raise ElasticityConfigError(
            f"elasticity 0.2 depends on the number of GPUs, but world_size is 0 and WORLD_SIZE is {text!r} in the "
            "environment. Give one of them."
        )
    return int(text)


def _check_version(text: str) -> None:
    numbers = tuple(map(int, re.findall(r"\d+", text)[:3]))
    if numbers < FIRST_VERSION:
        first = ".".join(map(str, FIRST_VERSION))
        raise ElasticityError(
            f"DeepSpeed {text} has no elasticity: it begins with {first}. Use a later version."
        )


# ------------------------------------------------------------------ reading
def _settings(ds_config: Mapping[str, Any]) -> ElasticSettings:
    """Return the section of a configuration. Raises ElasticityConfigError."""
    if not isinstance(ds_config, Mapping):
        raise ValueError(
            f"the configuration is {type(ds_config).__name__}: give the dictionary of the JSON file."
        )
    section = ds_config.get(SECTION)
    if section is None or not section.get("enabled", False):
        state = "missing" if section is None else "not enabled"
        raise ElasticityConfigError(
            f'the section "elasticity" is {state}: it needs {{"enabled": true, …}}.'
        )
    # values without a default
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if name not in section:
            raise ElasticityConfigError(f"elasticity.{name} is missing. Add it.")
    micro_batches = section["micro_batch_sizes"]
    is_list = isinstance(micro_batches, list) and bool(micro_batches)
    if not is_list or not all(
        isinstance(size, int) and size > 0 for size in micro_batches
    ):
        raise ElasticityConfigError(
            f"elasticity.micro_batch_sizes is {micro_batches}: it is a list of integers from 1 on."
        )
    # values with a default
    found = ElasticSettings(
        max_batch=section["max_train_batch_size"],
        micro_batches=tuple(micro_batches),
        min_gpus=_at_least_one(section, "min_gpus", 1),
        max_gpus=_at_least_one(section, "max_gpus", 10000),
        model_parallel=_at_least_one(section, "model_parallel_size", 1),
        gpus_per_node=_at_least_one(section, "num_gpus_per_node", 1),
        version=float(section.get("version", 0.2)),
        prefers_larger=section.get("prefer_larger_batch", True),
    )
    # values that contradict each other
    if found.max_gpus < found.min_gpus:
        raise ElasticityConfigError(
            f"elasticity.max_gpus {found.max_gpus} is below min_gpus {found.min_gpus}."
        )
    if found.version not in (0.1, 0.2):
        raise ElasticityConfigError(
            f"elasticity.version is {found.version:g}: 0.1 and 0.2 are known."
        )
    if found.model_parallel > 1 and found.version != 0.2:
        raise ElasticityConfigError(
            f"elasticity.model_parallel_size is {found.model_parallel}, but version 0.1 counts GPUs without model "
            'parallelism. Use "version": 0.2.'
        )
    return found


def _at_least_one(section: Mapping[str, Any], name: str, default: int) -> int:
    value = section.get(name, default)
    if value < 1:
        raise ElasticityConfigError(f"elasticity.{name} is {value}: it is at least 1.")
    return value
