"""How the parameters of a rank fall into sets, each with a layout of its own. Pure.

A set shares buffers and collectives, so its members agree in all that decides how they travel:

    expert       reduced over the expert-data axis
    frozen       no gradient, no optimizer state
    dtype        of the model
    stage        where gradients are sharded: the sets of two pipeline stages on one rank complete at different times;
                 `SHARED` is for what several of them use, complete after the last
    tied         where gradients are sharded: held by several pipeline stages, whose shards must match
    gathered     stage 3: parameters in shards; not so the smallest ones, which stay whole

Over a group of one there is nothing to shard: such a set keeps whole gradients and, unless they are offloaded, parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .layout import Layout, plan_layout
from .settings import ShardPolicy

SHARED = -1              # the stage of a parameter that several stages of this rank use
ALWAYS_WHOLE = 1000      # by default, the smallest parameters stay whole: one in so many elements


@dataclass(frozen=True, slots=True)
class Fact:
    """What decides a parameter's set. stage: its pipeline stage, or SHARED; layer: the first layer there that holds it."""

    name: str
    numel: int
    dtype: str
    expert: bool = False
    tied: bool = False
    frozen: bool = False
    stage: int | None = None
    layer: int = 0


@dataclass(frozen=True)
class SetPlan:
    """members: indices into the facts, in the order of layout.slots. policy: what is really split.

    inner: ranks of an inner group (hierarchy.py), over which gathered parameters are split
    units: of gathered parameters, (layer, first bucket, last bucket + 1) in the order of the buckets
    """

    members: tuple[int, ...]
    layout: Layout
    policy: ShardPolicy
    expert: bool
    frozen: bool
    tied: bool
    stage: int | None
    inner: int
    units: tuple[tuple[int, int, int], ...] = ()


def plan_sets(facts: Sequence[Fact], policy: ShardPolicy, *, data_shards: int, expert_shards: int, bucket_elements: int,
              persistence: int | None = None, gather_alone: bool = False,
              inner_shards: int | None = None) -> tuple[SetPlan, ...]:
    """facts: in forward order. persistence: smaller parameters stay whole (stage 3); None: see `smallest`.

    inner_shards: data-parallel ranks of an inner group, where the policy speaks of one
    gather_alone: also of a group of one the parameters are gathered, from where they were offloaded to
    """
    shards_of = lambda fact: expert_shards if fact.expert else data_shards
    threshold = smallest([fact.numel for fact in facts]) if persistence is None else persistence
    groups: dict[tuple, list[int]] = {}
    for i, fact in enumerate(facts):
        split = policy.gradient is not None and (shards_of(fact) > 1 or gather_alone)
        gathered = split and policy.parameter is not None and fact.numel >= threshold
        key = (fact.expert, fact.frozen, gathered, split and fact.tied, fact.dtype, fact.stage if split else None)
        groups.setdefault(key, []).append(i)
    order = sorted(groups, key=lambda key: tuple(map(str, key)))
    inner_of = lambda fact: inner_shards if policy.parameter == "inner" and not fact.expert else shards_of(fact)
    return tuple(_plan_set(facts, groups[key], key, policy, shards_of(facts[groups[key][0]]), inner_of(facts[groups[key][0]]),
                           bucket_elements) for key in order)


def smallest(sizes: Sequence[int]) -> int:
    """A threshold: the parameters below it are together at most one in ALWAYS_WHOLE of all elements."""
    room = sum(sizes) // ALWAYS_WHOLE
    for size in sorted(set(sizes)):
        room -= size * sizes.count(size)
        if room < 0:
            return size
    return 0


def _plan_set(facts, members: list[int], key: tuple, policy: ShardPolicy, shards: int, inner: int,
              bucket_elements: int) -> SetPlan:
    expert, frozen, gathered, tied, _, stage = key
    if not gathered:
        policy = replace(policy, parameter=None)
    if shards == 1 and not gathered:
        policy = replace(policy, gradient=None)
    # Whole gradients: tied and shared parameters are complete last. Buckets start in order: put them into the last one.
    is_late = lambda i: facts[i].tied or facts[i].stage == SHARED
    forward = members if policy.gradient else sorted(members, key=lambda i: not is_late(i))
    if gathered:
        forward = sorted(forward, key=lambda i: facts[i].layer)
    # Tied: a bucket each, so that the shards are the same on stages whose sizes of buckets differ.
    units = [facts[i].layer for i in forward] if gathered else None
    layout = plan_layout([(facts[i].name, facts[i].numel) for i in forward], 1 if tied else bucket_elements, shards,
                         units=units)
    in_buffer = tuple(forward[::-1])
    return SetPlan(in_buffer, layout, policy, expert, frozen, tied, stage, inner,
                   _units(layout, [facts[i].layer for i in in_buffer]) if gathered else ())


def _units(layout: Layout, layers: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    found: dict[int, list[int]] = {}
    for bucket in layout.buckets:
        found.setdefault(layers[bucket.first_slot], []).append(bucket.index)
    return tuple((layer, buckets[0], buckets[-1] + 1) for layer, buckets in found.items())
