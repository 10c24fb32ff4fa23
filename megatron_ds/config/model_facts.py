"""What is known of a model by its name, before it is made. Pure."""

from dataclasses import dataclass

from ..features import features


@dataclass(frozen=True)
class ModelFacts:
    """is_causal: whether a token sees itself and earlier ones alone."""

    is_causal: bool = True


GPT = ModelFacts()


def facts_of_model(name: str) -> ModelFacts:
    """Return the facts that a feature states of a model; those of a GPT where none states any."""
    stated = (feature.models[name] for feature in features() if name in feature.models)
    return next(stated, GPT)


def other_models() -> str:
    """Return --model with the names of those that are not causal, as advice in messages; "" without any."""
    stated: dict[str, ModelFacts] = {}
    for feature in features():
        stated |= feature.models
    names = [name for name, facts in stated.items() if not facts.is_causal]
    return f", or --model {' or '.join(names)}" if names else ""
