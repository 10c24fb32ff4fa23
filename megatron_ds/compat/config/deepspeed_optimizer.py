"""The block "optimizer" of a DeepSpeed JSON → options. The keys of each type are in `optimizer_facts.py`."""

from collections.abc import Mapping
from typing import Any

from ...config.optimizer_facts import FACTS
from ...config.options.option import Option, json_key
from ...config.sources.config_files import JsonDocument

TYPES = {kind.lower(): facts.name for facts in FACTS.values() for kind in facts.types}
ADAM_W_MODE = "optimizer.params.adam_w_mode"
NAMES = (
    "Adam and AdamW (both with decoupled weight decay), Lamb, Lion, Muon, Adagrad, SGD, OneBitAdam, "
    "ZeroOneAdam, OneBitLamb"
)
WIDTHS = ("muadam", "muadamw", "musgd")

# Keys whose option depends on the type.
OPTIMIZER_KEYS: Mapping[str, Option] = {
    "optimizer.type": json_key(str, f"`--optimizer`: {NAMES}"),
    "optimizer.params.betas": json_key(
        float,
        "`--adam-beta1`, `--adam-beta2`; of Lion `--lion-beta1`, `--lion-beta2`, 0.9 and 0.999 unless "
        "given",
        is_list=True,
        count=2,
    ),
    "optimizer.params.eps": json_key(
        float, "`--adam-eps`; of Adagrad `--adagrad-eps`", above=0
    ),
    "optimizer.params.momentum": json_key(
        float,
        "`--sgd-momentum`, 0 unless given; of Muon `--muon-momentum`, 0.95 unless given",
        at_least=0,
        below=1,
    ),
    "optimizer.params.max_grad_norm": json_key(
        float, "`--clip-grad`, like gradient_clipping", at_least=0
    ),
}


def _numbers(value: Any) -> tuple[Any, ...]:
    """Return the numbers of a parameter: none if it is not given, several for a list."""
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def translate_optimizer(document: JsonDocument) -> None:
    """Translate the type and its parameters. A parameter that is not given has DeepSpeed's default."""
    kind = document.take("optimizer.type")
    name = "adam" if kind is None else TYPES.get(kind.lower())
    if name is None:
        document.refuse(
            f'{document.path}: "optimizer.type" is {kind!r}, which is not available'
            f"{_why(kind)}. Available: {NAMES}.",
            "optimizer.optimizer",
        )
        return
    facts = FACTS[name]
    if kind is not None:
        document.give("optimizer.optimizer", name, "optimizer.type")
        document.refuse_params("optimizer", kind, set(facts.all_params))
    if is_adamw(document) and document.take(ADAM_W_MODE) is False:
        document.without_effect[f"{document.path} {ADAM_W_MODE}"] = (
            "the weight decay of the type AdamW is decoupled in any case, as in DeepSpeed"
        )
    # Parameters whose names or shapes differ here.
    document.copy("optimizer.params.max_grad_norm", "optimizer.clip_grad")
    for key in ("betas", "eps", "momentum"):
        value = document.take(f"optimizer.params.{key}")
        for option, number in zip(facts.params.get(key, ()), _numbers(value)):
            document.give(f"optimizer.{option}", number, f"optimizer.params.{key}")
    # DeepSpeed's defaults differ from those of the flags.
    given = {setting.path for setting in document.settings}
    for option, default in facts.defaults.items():
        if f"optimizer.{option}" not in given:
            document.give(
                f"optimizer.{option}", default, "optimizer.type, as DeepSpeed's default"
            )


def is_adamw(document: JsonDocument) -> bool:
    """Return whether the type is AdamW, whose weight decay is decoupled in any case."""
    return str(document.values.get("optimizer.type")).lower() == "adamw"


def _why(kind: str) -> str:
    if kind.lower() in WIDTHS:
        return (
            f": write {'SGD' if kind.lower() == 'musgd' else 'AdamW'}, and the learning rates of muP as "
            "--param-group (docs/scale/optimizers.md)"
        )
    return ""
