"""The plan of "tensor_parallel.partition_config" of an engine's JSON: which linear layers are divided, by patterns.

    {"use_default_specs": false, "layer_specs": [
        {"patterns": [".*\\\\.o_proj\\\\.weight$"], "partition_type": "row"},
        {"patterns": [".*\\\\.[qkv]_proj\\\\.weight$"], "partition_type": "column"},
        {"patterns": [".*\\\\.gate_up_proj\\\\.weight$"], "partition_type": "column", "shape": [2, -1]}]}

A pattern is compared with the beginning of a parameter's name, and the first that matches counts. A column of shape
[n, -1] has n equal layers, each of which is divided. With "use_default_specs", the default, the patterns change the
plan that the model has without them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...config.sources.reading import reject
from ...errors import ConfigError
from .adapted_layers import KEY, division_of_adapted, has_adapters
from .split_plan import (
    COLUMN,
    GATHERED,
    PARTIAL,
    ROW,
    Division,
    check_heads,
    is_linear,
    plan_of,
)

WHOLE = "whole"
# (partition_type, gather_output, grad_allreduce) → style
STYLES = {
    ("column", False, False): COLUMN,
    ("column", True, False): GATHERED,
    ("row", False, False): ROW,
    ("skip", False, False): WHOLE,
    ("skip", False, True): PARTIAL,
}
DIMENSIONS = {"column": 0, "row": 1}
RULE_KEYS = (
    "patterns",
    "partition_type",
    "shape",
    "partition_dim",
    "model_types",
    "gather_output",
    "grad_allreduce",
)
# Keys beside the rules, with the values that ask for nothing.
QUIET: Mapping[str, tuple] = {
    "embedding_partition_dim": (1,),
    "lm_head_patterns": (["lm_head", "embed_out"],),
    "strict_mode": (False,),
}


@dataclass(frozen=True)
class LayerRule:
    """One entry of "layer_specs".

    packed  the number of equal layers, None: by the name of the layer
    kinds   model types that it is for, none: all
    """

    patterns: tuple[str, ...]
    style: str
    packed: int | None
    kinds: tuple[str, ...]

    def matches(self, name: str) -> bool:
        """Return whether it is for a parameter."""
        return any(re.match(pattern, name) for pattern in self.patterns)


def division_of(model: nn.Module, given: Any, ranks: int) -> Division:
    """Return the plan of a model by the JSON's rules. Raises ConfigError.

    given  the value of "partition_config"; None: the plan of split_plan.py
    """
    if has_adapters(model):
        return division_of_adapted(model, given, ranks)
    if given is None:
        return Division(plan_of(model, None, ranks), {})
    rules = _read(given, ranks)
    check_heads(model, ranks)
    adds = given.get("use_default_specs", True)
    plan = dict(plan_of(model, None, ranks)) if adds else {}
    config = getattr(model, "config", None)
    kind = str(getattr(config, "model_type", "")).lower()
    chosen = [rule for rule in rules if kind in rule.kinds or not rule.kinds]
    packed: dict[str, int] = {}
    used = set()
    for name, is_layer in _names(model):
        rule = next((rule for rule in chosen if rule.matches(name)), None)
        if rule is not None and (is_layer or rule.style == PARTIAL):
            used.add(rule)
            _apply(rule, name, plan, packed)
    # A layer that stays whole anyway needs no name.
    wanted = [rule for rule in chosen if rule.style != WHOLE]
    if unused := [rule.patterns for rule in wanted if rule not in used]:
        raise ConfigError(
            f'"{KEY}": no weight of a linear layer of {type(model).__name__} has a name like {list(unused[0])}. '
            "Correct the patterns; names are those of model.named_parameters()."
        )
    if not plan:
        raise ConfigError(
            f'"{KEY}" leaves all layers of {type(model).__name__} whole. Name some in "layer_specs".'
        )
    return Division(plan, packed)


def _names(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield (name of a parameter, whether it is the weight of a linear layer)."""
    modules = dict(model.named_modules())
    for name, _ in model.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        is_layer = is_linear(modules[owner])
        yield name, is_layer and last == "weight"


def _apply(
    rule: LayerRule, name: str, plan: dict[str, str], packed: dict[str, int]
) -> None:
    layer = name.removesuffix(".weight")
    plan.pop(layer, None)
    if rule.style == WHOLE:
        return
    plan[name if rule.style == PARTIAL else layer] = rule.style
    if rule.packed is not None:
        packed[layer] = rule.packed


# ---------------------------------------------------------------------- reading
def _read(given: Any, ranks: int) -> list[LayerRule]:
    """Raises one ConfigError with all problems."""
    specs: Any = given.get("layer_specs", []) if isinstance(given, Mapping) else None
    is_list = isinstance(specs, list)
    if not is_list or not all(isinstance(spec, Mapping) for spec in specs):
        raise ConfigError(
            f'"{KEY}" is {given!r}: it is a block with "layer_specs", a list of blocks.'
        )
    problems = []
    allowed = {**QUIET, "tp_size": (1, ranks)}
    for key, value in given.items():
        if key in ("layer_specs", "use_default_specs"):
            continue
        if value not in allowed.get(key, ()):
            problems.append(f'"{KEY}.{key}": {value!r} is not available. Leave it out.')
    for spec in specs:
        problems += _problems(spec)
    reject(problems)
    return [_rule_of(spec) for spec in specs]


def _rule_of(spec: Mapping[str, Any]) -> LayerRule:
    return LayerRule(
        tuple(spec["patterns"]),
        STYLES[_style_key(spec)],
        _packed(spec.get("shape")),
        tuple(kind.lower() for kind in spec.get("model_types") or ()),
    )


def _style_key(spec: Mapping[str, Any]) -> tuple:
    kind = spec.get("partition_type", "column")
    return (
        str(kind).lower(),
        spec.get("gather_output", False),
        spec.get("grad_allreduce", False),
    )


def _packed(shape: Any) -> int | None:
    """Return n of [n, -1]; 0 for another shape; None without one."""
    if shape is None:
        return None
    if not isinstance(shape, list | tuple) or len(shape) != 2:
        return 0
    number, rest = shape
    fits = rest == -1 and type(number) is int and number > 0
    return number if fits else 0


def _problems(spec: Mapping[str, Any]) -> Iterator[str]:
    # Each key by itself.
    for key in spec.keys() - set(RULE_KEYS):
        yield f'"{KEY}": unknown key {key!r} in "layer_specs". Leave it out.'
    patterns: Any = spec.get("patterns")
    is_list = isinstance(patterns, list | tuple) and patterns
    if not is_list or not all(map(_is_pattern, patterns)):
        yield f'"{KEY}": "patterns" is {patterns!r}: it is a list of regular expressions.'
    kinds = spec.get("model_types") or ()
    if not all(map(_is_pattern, kinds)):
        yield f'"{KEY}": "model_types" is {kinds!r}: it is a list of names.'
    # What they ask for together.
    asked = _style_key(spec)
    if asked not in STYLES:
        yield (
            f'"{KEY}": {patterns} has (partition_type, gather_output, grad_allreduce) = {asked}, and there are '
            f"{', '.join(map(str, STYLES))}."
        )
    elif spec.get("partition_dim") not in (None, DIMENSIONS.get(asked[0])):
        yield (
            f'"{KEY}": {patterns} has "partition_dim": {spec["partition_dim"]}; a column is divided along 0 and a row '
            "along 1. Leave it out."
        )
    packed = _packed(spec.get("shape"))
    if packed == 0 or packed is not None and asked[0] != "column":
        yield (
            f'"{KEY}": {patterns} has "shape": {spec["shape"]}, and only columns of equal layers, [n, -1], can be '
            "divided. Leave the shape out, or skip the layer."
        )


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (TypeError, re.error):
        return False
    return isinstance(value, str)
