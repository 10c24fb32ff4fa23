"""Importing this module registers the kernels for GPUs."""

from .gpu import (
    adam_kernels,
    cross_entropy_kernels,
    dropout_kernels,
    flex_choice,
    fp32_sums,
    gated_kernels,
    norm_kernels,
    permute_kernels,
    quantize_kernels,
    rotary_kernels,
    softmax_kernels,
)

REGISTERING = (
    adam_kernels,
    cross_entropy_kernels,
    dropout_kernels,
    flex_choice,
    fp32_sums,
    gated_kernels,
    norm_kernels,
    permute_kernels,
    quantize_kernels,
    rotary_kernels,
    softmax_kernels,
)
