"""Which layers of a model are divided over tensor-parallel ranks: the name of each → its style.

The first of these that is there:

    injection_policy      {LayerClass: names}: the named linear layers are rows, all others of the layer columns
    the model's plan      `tp_plan` of transformers' models
    known names           ROWS, in the repeated layers of the model

Shoeybi et al. 2019 (arXiv:1909.08053), section 3: each rank has some columns of a first linear layer and the same
rows of a second one, whose results are summed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from ...errors import ConfigError

COLUMN = "colwise"
ROW = "rowwise"
GATHERED = "colwise_gather_output"
SLICED = "rowwise_split_input"
PACKED = "packed_colwise"
SUMMED = "moe_tp_experts"
PARTIAL = "replicated_with_grad_allreduce"
# Styles of transformers under which a layer stays whole here.
WHOLE = ("embedding_rowwise",)
STYLES = (COLUMN, ROW, GATHERED, SLICED, PACKED, SUMMED, PARTIAL)

BASE = "base_layer"  # where an adapter of peft keeps the layer that it adapts

# Ends of names of linear layers whose results are summed, and of those that each rank needs whole.
ROWS = (
    "o_proj",
    "out_proj",
    "down_proj",
    "dense_4h_to_h",
    "self_attention.dense",
    "attention.dense",
    "self_attn.dense",
    "output.dense",
    "c_proj",
    "fc2",
    "fc_out",
    "out_lin",
    "lin2",
    "wo",
    "SelfAttention.o",
    "EncDecAttention.o",
)
NEVER = (
    "gate",
    "router",
    "router.classifier",
    "shared_expert_gate",
    "q_a_proj",
    "kv_a_proj_with_mqa",
)
# Sizes of a config that must be divisible by the ranks.
COUNTS = (
    "num_attention_heads",
    "num_key_value_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "num_kv_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)

Plan = Mapping[str, str]


class Division(NamedTuple):
    """A plan, and the number of equal layers in linear layers that have several."""

    plan: Plan
    packed: Mapping[str, int]


def plan_of(
    model: nn.Module, policy: Mapping[Any, tuple[str, ...]] | None, ranks: int
) -> Plan:
    """Return name of a module or parameter → style. Raises ConfigError if the model cannot be divided by `ranks`."""
    check_heads(model, ranks)
    if policy is not None:
        return _plan_of_policy(model, policy)
    if own := getattr(model, "tp_plan", None):
        return _plan_of_patterns(model, own)
    return _plan_of_names(model)


def check_heads(model: nn.Module, ranks: int) -> None:
    """Raises ConfigError if the attention heads of a transformers model are not divisible by `ranks`."""
    config = getattr(model, "config", None)
    text_config = getattr(config, "get_text_config", None)
    config = config if text_config is None else text_config()
    for name in COUNTS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count % ranks:
            raise ConfigError(
                f"{type(model).__name__} has {name}={count}, which {ranks} tensor-parallel ranks do not divide: "
                "each rank needs whole heads. Give a size that divides it."
            )
    is_grouped = getattr(config, "new_decoder_architecture", False)
    if getattr(config, "multi_query", False) and not is_grouped:
        raise ConfigError(
            f"{type(model).__name__} has one key head for all query heads (multi_query), which tensor-parallel "
            "ranks cannot divide. Give a tensor-parallel size of 1."
        )


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is a linear layer: torch's, or transformers' `Conv1D`."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def adapted_base(module: nn.Module) -> nn.Module | None:
    """Return the layer to which peft has added factors (`lora_A`, `lora_B`), None for any other module."""
    inside = module._modules
    return inside.get(BASE) if "lora_A" in inside else None


def linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return name → linear layer inside; one with an adapter of peft has the name that it had without."""
    found = {}
    adapted: tuple[str, ...] = ()
    for name, each in module.named_modules():
        if name.startswith(adapted):
            continue
        base = adapted_base(each)
        if base is not None:
            adapted += (f"{name}.",)
        layer = each if base is None else base
        if is_linear(layer):
            found[name] = layer
    return found


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight of a linear layer is [inputs, outputs]: transformers' `Conv1D`."""
    return type(module).__name__.endswith("Conv1D") and hasattr(module, "nf")


def _plan_of_policy(
    model: nn.Module, policy: Mapping[Any, tuple[str, ...]]
) -> dict[str, str]:
    plan: dict[str, str] = {}
    for kind, names in policy.items():
        layers = [
            (at, layer)
            for at, layer in model.named_modules()
            if isinstance(layer, kind)
        ]
        found = []
        ends = tuple(name.strip(".") for name in names)
        for at, layer in layers:
            found += _add_layer(plan, at, layer, ends)
        for name in names:
            if not any(_ends_with(row, name.strip(".")) for row in found):
                raise ConfigError(
                    f"injection_policy: no linear layer {name!r} is in a {kind.__name__} of {type(model).__name__}. "
                    "Give names within the layer, as in layer.named_modules()."
                )
    return plan


def _plan_of_patterns(model: nn.Module, patterns: Mapping[str, str]) -> dict[str, str]:
    """transformers' plan, whose names have `*` for numbers. Raises ConfigError for a style that is not known."""
    plan: dict[str, str] = {}
    names = [*dict(model.named_modules()), *dict(model.named_parameters())]
    for pattern, style in patterns.items():
        written = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matching = [name for name in names if written.fullmatch(name)]
        if matching and style not in (*STYLES, *WHOLE):
            raise ConfigError(
                f"the tensor-parallel plan of {type(model).__name__} has {matching[0]}: {style!r}, which is not "
                "available. Give a tensor-parallel size of 1, or use ZeRO stage 3 (docs/use/inference_engine.md)."
            )
        plan |= {name: style for name in matching if style in STYLES}
    if not plan:
        raise ConfigError(
            f"the tensor-parallel plan of {type(model).__name__} has no name of its modules, such as "
            f"{next(iter(patterns))}. Give the model itself, without adapters and before torch.compile."
        )
    return plan


def _plan_of_names(model: nn.Module) -> dict[str, str]:
    plan: dict[str, str] = {}
    rows = []
    for at, layer in repeated_layers(model):
        rows += _add_layer(plan, at, layer, ROWS)
    if not rows:
        raise ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan, and no repeated layer of it has a linear layer "
            f"with a known name ({', '.join(ROWS)}). Give injection_policy={{LayerClass: names}} with the linear "
            "layers whose results are summed over ranks."
        )
    return plan


def repeated_layers(
    module: nn.Module, prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the members of the outermost module lists."""
    for name, child in module.named_children():
        at = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            yield from (
                (f"{at}.{index}", layer) for index, layer in child.named_children()
            )
        else:
            yield from repeated_layers(child, f"{at}.")


def _add_layer(
    plan: dict[str, str], at: str, layer: nn.Module, rows: tuple[str, ...]
) -> list[str]:
    """Add the linear layers of one repeated layer to the plan; returns the names of its rows."""
    inside = linear_layers(layer)
    found = [name for name in inside if any(_ends_with(name, row) for row in rows)]
    for name in inside if found else ():
        if not any(_ends_with(name, whole) for whole in NEVER):
            plan[f"{at}.{name}"] = ROW if name in found else COLUMN
    return found


def _ends_with(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")
