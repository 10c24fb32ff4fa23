"""Which operations of the table of kernels a run calls, for the start-up text.

`CONDITIONS` has those that depend on the configuration; a test compares it with the calls of real steps.
"""

from collections.abc import Callable

import torch

from ..config import RunConfig
from ..ops.cpu.widened_products import has_products
from ..ops.kernel_table import OPERATIONS

Condition = Callable[[RunConfig, str], bool]  # (configuration, type of the device)


def _never(config: RunConfig, device: str) -> bool:
    return False


def _has_experts(config: RunConfig, device: str) -> bool:
    return any(config.model.experts)


def _is_padded(config: RunConfig, device: str) -> bool:
    return (
        _has_experts(config, device) and config.model.moe_pad_expert_input_to_capacity
    )


def _is_not_padded(config: RunConfig, device: str) -> bool:
    return _has_experts(config, device) and not _is_padded(config, device)


def _exchanges_rows(config: RunConfig, device: str) -> bool:
    return (
        _is_not_padded(config, device)
        and config.parallel.expert_model_parallel_size > 1
    )


def _drops_hidden(config: RunConfig, device: str) -> bool:
    return config.model.hidden_dropout > 0


def _drops_attention(config: RunConfig, device: str) -> bool:
    return config.model.attention_dropout > 0


def _drops(config: RunConfig, device: str) -> bool:
    return _drops_hidden(config, device) or _drops_attention(config, device)


def _is_rotary(config: RunConfig, device: str) -> bool:
    return config.model.is_rotary


def _splits_rotary(config: RunConfig, device: str) -> bool:
    return _is_rotary(config, device) and not config.model.qk_layernorm


def _is_on_cpu(config: RunConfig, device: str) -> bool:
    return device == "cpu"


def _is_on_gpu(config: RunConfig, device: str) -> bool:
    return device != "cpu"  # a CPU keeps probabilities (ops/cpu/kept_probabilities.py)


def _has(activation: str) -> Condition:
    return lambda config, device: config.model.activation == activation


def _has_gelu(config: RunConfig, device: str) -> bool:
    model = config.model  # the head of BERT has no gated activation
    return model.activation == "gelu" or model.model == "bert" and model.is_gated


def _has_wider_gradients(config: RunConfig, device: str) -> bool:
    dtype = config.optimizer.params_dtype
    is_added_up = device == "cpu" and not has_products(
        getattr(torch, dtype)
    )  # fp32 products are added
    return config.optimizer.gradient_dtype != dtype and not is_added_up


def _quantizes(config: RunConfig, device: str) -> bool:
    zero = config.zero  # one rank neither splits weights nor sends gradients
    ranks = config.data_parallel_size * config.parallel.context_parallel_size
    return ranks > 1 and (zero.zero_quantized_weights or zero.zero_quantized_gradients)


def _normalizes(by: str) -> Condition:
    return lambda config, device: config.model.normalization == by


def _optimizes(by: str) -> Condition:
    return lambda config, device: config.optimizer.optimizer == by


CONDITIONS: dict[str, Condition] = {
    "quantize": _quantizes,
    "dequantize": _quantizes,
    "cast_fp8": _never,
    "permute": _is_not_padded,
    "combine": _is_not_padded,
    "reorder": _exchanges_rows,
    "permute_padded": _is_padded,
    "combine_padded": _is_padded,
    "dropout": _drops_hidden,
    "dropout_add": _drops_hidden,
    "draw_keep_masks_": _drops,
    "residual_norm": lambda config, device: (
        not (_drops_hidden(config, device) or config.model.use_parallel_residual)
    ),
    "fill_attention_mask_": _drops_attention,
    "masked_softmax": _drops_attention,
    "apply_rotary": _is_rotary,
    "split_rotary": _splits_rotary,
    "cross_entropy_facts": _is_on_gpu,
    "cross_entropy_gradient_": _is_on_gpu,
    "gelu": _has_gelu,
    "swiglu": _has("swiglu"),
    "squared_relu": _has("squared_relu"),
    "layer_norm": _normalizes("LayerNorm"),
    "rms_norm": _normalizes("RMSNorm"),
    "add_narrow_": _has_wider_gradients,
    "probabilities_": _is_on_cpu,
    "probability_gradient_": _is_on_cpu,
    "lion": _optimizes("lion"),
    "adagrad": _optimizes("adagrad"),
    "adamw": lambda config, device: (
        config.optimizer.optimizer in ("adam", "adamw")
        and config.optimizer.decoupled_weight_decay
    ),
}


def used_operations(config: RunConfig, device: str) -> list[str]:
    """The names of the operations that the steps of a run call, in alphabetical order."""
    always = lambda config, device: True
    return sorted(
        name for name in OPERATIONS if CONDITIONS.get(name, always)(config, device)
    )
