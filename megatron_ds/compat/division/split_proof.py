"""The comparison of a divided model with the whole one, on the small inputs that transformers' models have.

A plan may miss something that only the model's code shows: a fused layer, a norm over all heads, a bias for each
head. So the model computes its `dummy_inputs` (15 tokens) before and after it is divided, and a model whose
results differ is refused. Modules without `dummy_inputs` are not compared.
"""

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import CommunicationError, ConfigError

# Largest difference by rounding, as a part of the largest result.
BOUNDS = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
ADVICE = (
    'Name its layers (injection_policy of init_inference, "tensor_parallel.partition_config" of an engine\'s JSON), '
    "give a tensor-parallel size of 1, or use ZeRO stage 3 (docs/use/inference_engine.md)."
)


@torch.no_grad()
def results_of(model: nn.Module) -> torch.Tensor | None:
    """Return the first result of `model` for its dummy inputs, on the CPU; None if it has none."""
    inputs = small_inputs(model)
    return None if inputs is None else model(**inputs)[0].float().cpu()


def small_inputs(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Return the dummy inputs of a model of transformers; None for other modules. Raises ConfigError."""
    given = getattr(model, "dummy_inputs", None)
    if not isinstance(given, Mapping):
        return None
    if getattr(model, "main_input_name", "input_ids") not in given:
        raise ConfigError(
            f"{type(model).__name__} is a model of transformers without small inputs ({model.main_input_name}), so "
            "what it computes cannot be compared after its division. Give a tensor-parallel size of 1."
        )
    where = next(model.parameters()).device
    inputs = {name: value.to(where) for name, value in given.items()}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs.setdefault("decoder_input_ids", inputs["input_ids"])
    return inputs


def require_same_results(model: nn.Module, whole: torch.Tensor | None) -> None:
    """Raises ConfigError unless the divided model has the results of the whole one. Collective."""
    if whole is None:
        return
    kind = type(model).__name__
    with shapes_reported(kind):
        found = results_of(model)
    assert found is not None, "the whole model had results"
    if found.shape != whole.shape:
        raise ConfigError(
            f"{kind} has results of shape {list(found.shape)} after its layers were divided over tensor-parallel "
            f"ranks, and {list(whole.shape)} before. {ADVICE}"
        )
    most = whole.abs().max()
    difference = (found - whole).abs().max() / most.clamp(min=1e-30)
    bound = BOUNDS[next(model.parameters()).dtype]
    if not difference <= bound:
        raise ConfigError(
            f"{kind} computes something else after its layers were divided over tensor-parallel ranks: the "
            f"results differ by {difference:.2g} of the largest one, and rounding explains {bound:g}. {ADVICE}"
        )


@contextmanager
def shapes_reported(kind: str) -> Any:
    """Errors of a forward with divided layers, as a ConfigError."""
    try:
        yield
    except CommunicationError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{kind} cannot compute with layers divided over tensor-parallel ranks: {error}. {ADVICE}"
        ) from error
