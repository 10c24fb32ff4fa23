"""What is known of each optimizer before it is made: its names, its options, its state. Pure.

Rules, DeepSpeed's JSON and the parameter groups of an engine read it; `megatron_ds/optim` has a file of the
same optimizer's mathematics, and tests compare the two. An optimizer that is registered without a row here
takes the options of the whole section.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..features import Feature, own_features
from .options.training import OptimizerConfig

# What the update of an element depends on, besides that element.
ELEMENT = "nothing else"
NORMS = "norms of whole parameters"
MATRIX = "the whole matrix"
COMMON = {
    "lr": ("lr",),
    "weight_decay": ("weight_decay",),
    "max_grad_norm": ("clip_grad",),
}
GROUP_NUMBERS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "max_coeff",
    "min_coeff",
)


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer.

    types     what DeepSpeed's `optimizer.type` may be, in any case
    params    key of DeepSpeed's `optimizer.params` → fields of `OptimizerConfig`, in addition to COMMON
    fields    further fields of `OptimizerConfig` that it reads, without a key
    defaults  field → DeepSpeed's default, where it is not the flag's
    state     names of the tensors that it keeps for each parameter, fp32, of the parameter's size
    depends   what the update of an element depends on, besides that element
    rules     (RunConfig) -> problems of its options, as sentences, where it is in use
    """

    name: str
    types: tuple[str, ...]
    params: Mapping[str, tuple[str, ...]]
    state: tuple[str, ...]
    fields: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    depends: str = ELEMENT
    rules: tuple[Callable[[Any], Iterable[str]], ...] = ()

    @property
    def all_params(self) -> dict[str, tuple[str, ...]]:
        """All keys of `optimizer.params` that it has."""
        return {**COMMON, **self.params}

    @property
    def own_fields(self) -> tuple[str, ...]:
        """Return the fields of `OptimizerConfig` that it reads, without those that every optimizer reads."""
        return (
            *(name for names in self.params.values() for name in names),
            *self.fields,
        )

    def numbers(self, settings: OptimizerConfig) -> dict[str, Any]:
        """Return the hyper-parameters of a parameter group, under torch's names."""
        values = {
            key: tuple(getattr(settings, name) for name in names)
            for key, names in self.all_params.items()
            if key in GROUP_NUMBERS
        }
        return {
            key: value if key == "betas" else value[0] for key, value in values.items()
        }


MOMENTS = {
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_eps",),
    "bias_correction": ("adam_bias_correction",),
}


def _adam_variants(config: Any) -> Iterator[str]:
    if config.optimizer.adam_amsgrad and not config.optimizer.adam_bias_correction:
        yield (
            "[adam_amsgrad] is torch's, which corrects its moments, but [adam_bias_correction]. Remove "
            "one of them."
        )


def _added() -> Iterator[OptimizerFacts]:
    # Rows of features are made with the names above.
    for feature in own_features():
        for facts in feature.optimizers.values():
            yield facts.load()


def _aliases(feature: Feature) -> Iterator[tuple[str, str]]:
    named = feature.registers.get("optimizer", {})
    return ((alias, name) for alias, name in named.items() if name in named)


FACTS: Mapping[str, OptimizerFacts] = {
    facts.name: facts
    for facts in (
        OptimizerFacts(
            "adam",
            ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"),
            MOMENTS
            | {
                "adam_w_mode": ("decoupled_weight_decay",),
                "amsgrad": ("adam_amsgrad",),
            },
            ("exp_avg", "exp_avg_sq"),
            rules=(_adam_variants,),
        ),
        OptimizerFacts(
            "sgd",
            ("SGD",),
            {"momentum": ("sgd_momentum",)},
            ("momentum_buffer",),
            defaults={"sgd_momentum": 0.0},
        ),
        *_added(),
    )
}

SYNONYMS = {
    "adamw": "adam",
    **{alias: name for feature in own_features() for alias, name in _aliases(feature)},
}


def facts_of(name: str | None) -> OptimizerFacts | None:
    """Return the facts of an optimizer by the name of its flag; None for an optimizer without a row."""
    return None if name is None else FACTS.get(SYNONYMS.get(name, name))
