"""Importing this module registers the kernels for CPUs."""

from .cpu import (
    compiled_adam,
    compiled_addition,
    compiled_attention,
    compiled_cross_entropy,
    compiled_gated,
    compiled_gelu,
    compiled_norms,
    compiled_product,
    compiled_quantize,
    compiled_rotary,
)

REGISTERING = (
    compiled_adam,
    compiled_addition,
    compiled_attention,
    compiled_cross_entropy,
    compiled_gated,
    compiled_gelu,
    compiled_norms,
    compiled_product,
    compiled_quantize,
    compiled_rotary,
)
