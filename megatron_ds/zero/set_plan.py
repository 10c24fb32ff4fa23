"""How the parameters of a rank fall into sets, each with a layout of its own. Pure.

The parameters of a set share buffers and collectives, so they agree in everything that decides how they are
communicated:

    reduced_over  the mesh axes over which gradients are summed
    frozen        no gradient, no optimizer state
    dtype         of the model
    stage         if gradients are sharded: the sets of two pipeline stages on one rank complete at different
                  times; `SHARED` is for parameters that several of them use, complete after the last
    tied          if gradients are sharded: held by several pipeline stages, whose shards must match
    gathered      stage 3: parameters in shards; the smallest ones are not, they stay whole
    whole         updated by an optimizer that needs whole tensors: each is owned by one rank

In a group of one rank there is nothing to shard: such a set keeps whole gradients and, unless they are
offloaded, whole parameters. `plan_parameters` is the one place that makes sets: `ZeroOptimizer` and the plan
of a run both call it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn

from ..errors import ConfigError
from ..mpu.managed_parameter import spec_of
from ..mpu.param_spec import DATA_AXES
from ..optim import group_of
from .data_groups import Axes, DataGroups
from .layout import Layout, plan_layout, plan_whole_layout
from .offload_settings import DEVICE
from .settings import ShardPolicy, ZeroSettings

if TYPE_CHECKING:
    from .number_blocks import Blocks

SHARED = -1  # the stage of a parameter that several stages of this rank use
# By default the smallest parameters stay whole: one in this many elements.
ALWAYS_WHOLE = 1000


@dataclass(frozen=True)
class ParameterUse:
    """How the model uses its parameters, on the pipeline stages of this rank.

    layers    stage → the parameters of each layer, in forward order. Stages of a rank may share a parameter:
              input and output embedding if both ends of the pipeline are on one rank. Such a parameter is of
              stage `SHARED`; its gradient is reduced once, after the last backward of all of them
    not_read_in_backward  (stage, layer) of layers whose backward does not read their weights
    counts    contributions to the gradient per backward, 1 where absent; the reduction of tied gradients is
              not counted
    stage_of  the stage of parameters that `layers` does not contain; `arm` and `reduce_tied` of any stage
              concern parameters without one
    """

    layers: Mapping[int, Sequence[Sequence[nn.Parameter]]] = field(default_factory=dict)
    not_read_in_backward: frozenset[tuple[int, int]] = frozenset()
    counts: Mapping[nn.Parameter, int] = field(default_factory=dict)
    stage_of: Mapping[nn.Parameter, int] = field(default_factory=dict)

    @classmethod
    def of_stages(
        cls,
        stages: Mapping[int, Sequence[nn.Module]],
        counts: Mapping[nn.Parameter, int] | None = None,
    ) -> "ParameterUse":
        """Return the use of parameters in these stages. stages: layers of each stage, in forward order; stage 0 is
        the first of the model."""
        layers = {
            stage: [list(module.parameters()) for module in modules]
            for stage, modules in stages.items()
        }
        unread = set()
        for stage, modules in stages.items():
            for i, module in enumerate(modules):
                if not getattr(module, "weights_read_in_backward", True):
                    unread.add((stage, i))
        # Backward ends at the first layer that is trained: the model's input has no gradient.
        for i, parameters in enumerate(layers.get(0, ())):
            if any(p.requires_grad for p in parameters):
                break
            unread.add((0, i))
        return cls(layers, frozenset(unread), counts or {})

    def places(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Parameter → (its stage or SHARED, the first layer there that uses it)."""
        found: dict[nn.Parameter, dict[int, int]] = defaultdict(dict)
        for stage, layers in self.layers.items():
            for i, layer in enumerate(layers):
                for p in layer:
                    found[p].setdefault(stage, i)
        in_layers = {
            p: next(iter(places.items())) if len(places) == 1 else (SHARED, 0)
            for p, places in found.items()
        }
        return {p: (stage, 0) for p, stage in self.stage_of.items()} | in_layers

    def used_twice(self) -> frozenset[nn.Parameter]:
        """Parameters that several layers use."""
        seen: set[nn.Parameter] = set()
        twice: set[nn.Parameter] = set()
        for layers in self.layers.values():
            for layer in layers:
                twice |= seen.intersection(layer)
                seen |= set(layer)
        return frozenset(twice)


@dataclass(frozen=True, slots=True)
class Fact:
    """What decides the set of a parameter. layer: the first of `stage` that holds it. itemsize: bytes of an element"""

    name: str
    numel: int
    dtype: str
    reduced_over: Axes = DATA_AXES
    tied: bool = False
    frozen: bool = False
    stage: int | None = None
    layer: int = 0
    whole: bool = False
    encoded: bool = False
    itemsize: int | None = None


@dataclass(frozen=True)
class SetPlan:
    """The plan of a set.

    members  indices of its parameters in the list of all facts, in the order of layout.slots
    policy   what is split, after all exceptions
    inner    ranks of an inner group (data_groups.py), over which gathered parameters are split
    units    of gathered parameters: (layer, first bucket, last bucket + 1), in the order of the buckets
    blocks   the format in which gathered parameters are kept for others and sent; None: their dtype
    encoded  frozen weights that are kept in that format alone, and decoded for their layer
    itemsize  bytes of an element; None: of the model's dtype
    """

    members: tuple[int, ...]
    layout: Layout
    policy: ShardPolicy
    reduced_over: Axes
    frozen: bool
    tied: bool
    whole: bool
    stage: int | None
    inner: int
    units: tuple[tuple[int, int, int], ...] = ()
    blocks: "Blocks | None" = None
    encoded: bool = False
    itemsize: int | None = None


def plan_parameters(
    parameters: Sequence[nn.Parameter],
    settings: ZeroSettings,
    groups: DataGroups,
    use: ParameterUse,
) -> tuple[SetPlan, ...]:
    """Return the sets of `parameters`, which are given in forward order, each once.

    Raises ConfigError if an optimizer needs whole tensors and tensor parallelism splits a parameter.
    """
    places = use.places()
    facts = []
    for p in parameters:
        groups.check(spec_of(p))
        whole = (
            p.requires_grad
            and group_of(spec_of(p), settings.param_groups).traits.needs_whole_tensors
        )
        divided = groups.dividing(spec_of(p).reduced_over).size
        if whole and spec_of(p).tensor_split is not None and divided > 1:
            # A matrix that tensor parallelism splits would have to be gathered for each update, with its
            # momentum, by ranks that hold whole optimizer state of it.
            group = group_of(spec_of(p), settings.param_groups)
            raise ConfigError(
                f"the optimizer of parameter group {group.name!r} needs whole tensors, but {spec_of(p).name} is "
                f"split over {divided} tensor-parallel ranks, and an update of each part by itself is "
                "not the update of the whole. Use --tensor-model-parallel-size 1, or put the parameter into "
                "a group whose optimizer treats elements one by one."
            )
        stage, layer = places.get(p, (None, 0))
        facts.append(
            Fact(
                spec_of(p).name,
                p.numel(),
                str(p.dtype),
                spec_of(p).reduced_over,
                is_tied(p, groups),
                not p.requires_grad,
                stage,
                layer,
                whole,
                settings.frozen_blocks is not None
                and not p.requires_grad
                and spec_of(p).matrices is not None,
                p.dtype.itemsize,
            )
        )
    sizes = {axes: group.size for axes, group in groups.by_axes.items()}
    return plan_sets(
        facts, settings, sizes, groups.inner.size if groups.inner else None
    )


def is_tied(p: nn.Parameter, groups: DataGroups) -> bool:
    """Return whether other pipeline ranks hold copies of the parameter."""
    return spec_of(p).tied is not None and groups.tied.size > 1


def plan_sets(
    facts: Sequence[Fact],
    settings: ZeroSettings,
    shards: Mapping[Axes, int],
    inner_shards: int | None = None,
) -> tuple[SetPlan, ...]:
    """Divide the parameters into sets.

    facts         of all parameters, in forward order
    shards        number of ranks along the axes over which gradients are summed
    inner_shards  data-parallel ranks of an inner group, for the policy that has inner groups
    """
    # One rank gathers too, from an offload tier.
    alone = settings.offload.parameters != DEVICE
    threshold = (
        smallest([fact.numel for fact in facts])
        if settings.persistence is None
        else settings.persistence
    )
    # Parameters that are reduced, split and gathered alike form a set.
    groups: dict[tuple, list[int]] = {}
    for i, fact in enumerate(facts):
        split = settings.policy.gradient is not None and (
            shards[fact.reduced_over] > 1 or alone
        )
        if fact.encoded:
            split = settings.policy.parameter is not None and split
        gathered = fact.encoded or (
            split and settings.policy.parameter is not None and fact.numel >= threshold
        )
        key = (
            fact.reduced_over,
            fact.frozen,
            gathered,
            split and fact.tied,
            fact.dtype,
            fact.stage if split or fact.encoded else None,
            fact.whole,
            fact.encoded,
        )
        groups.setdefault(key, []).append(i)
    # The order of the sets is that of their keys, the same on all ranks.
    num_parameters = sum(fact.numel for fact in facts)
    order = sorted(groups, key=lambda key: tuple(map(str, key)))
    return tuple(
        _plan_set(
            facts,
            groups[key],
            key,
            settings,
            shards[key[0]],
            inner_shards,
            settings.elements_of_bucket(num_parameters, shards[key[0]]),
        )
        for key in order
    )


def smallest(sizes: Sequence[int]) -> int:
    """Return a threshold: the parameters below it are together at most one in ALWAYS_WHOLE of all elements."""
    room = sum(sizes) // ALWAYS_WHOLE
    for size in sorted(set(sizes)):
        room -= size * sizes.count(size)
        if room < 0:
            return size
    return 0


def _plan_set(
    facts: Sequence[Fact],
    members: list[int],
    key: tuple,
    settings: ZeroSettings,
    shards: int,
    inner_shards: int | None,
    bucket_elements: int,
) -> SetPlan:
    axes, frozen, gathered, tied, _, stage, whole, encoded = key
    policy = settings.policy
    # Below ZeRO 3 each rank has all of the encoded weights, and decodes them by itself.
    if encoded and (policy.parameter is None or shards == 1):
        policy = ShardPolicy(None, None, None)
        shards = 1
    align = settings.align
    inner = shards
    if policy.parameter == "inner" and axes == DATA_AXES and inner_shards is not None:
        inner = inner_shards
    if not gathered:
        policy = replace(policy, parameter=None)
    if shards == 1 and not gathered:
        policy = replace(policy, gradient=None)
    # The order of the buffer. Whole gradients: tied and shared parameters are complete last. Buckets start in
    # order: put them into the last one.
    is_late = lambda i: facts[i].tied or facts[i].stage == SHARED
    forward = (
        members if policy.gradient else sorted(members, key=lambda i: not is_late(i))
    )
    if gathered:
        forward = sorted(forward, key=lambda i: facts[i].layer)
    items = [(facts[i].name, facts[i].numel) for i in forward]
    # The layout. Tied: a bucket each, so that shards are the same on stages whose sizes of buckets differ.
    if whole and policy.optimizer is not None:
        layout = plan_whole_layout(items, bucket_elements, shards, align, alone=tied)
    else:
        layers = [facts[i].layer for i in forward] if gathered else None
        layout = plan_layout(
            items, 1 if tied else bucket_elements, shards, align, units=layers
        )
    index_of = {facts[i].name: i for i in forward}
    in_buffer = tuple(index_of[slot.name] for slot in layout.slots)
    units = _units(layout, [facts[i].layer for i in in_buffer]) if gathered else ()
    return SetPlan(
        in_buffer,
        layout,
        policy,
        axes,
        frozen,
        tied,
        whole,
        stage,
        inner,
        units,
        settings.frozen_blocks if encoded else _sent_blocks(settings, gathered),
        encoded,
        facts[members[0]].itemsize,
    )


def _sent_blocks(settings: ZeroSettings, gathered: bool) -> "Blocks | None":
    return settings.weight_blocks if gathered else None


def _units(layout: Layout, layers: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    found: dict[int, list[int]] = {}
    for bucket in layout.buckets:
        found.setdefault(layers[bucket.first_slot], []).append(bucket.index)
    return tuple(
        (layer, buckets[0], buckets[-1] + 1) for layer, buckets in found.items()
    )
