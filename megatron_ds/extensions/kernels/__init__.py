"""Kernels: implementations of operations (ops/) in C++ for CPUs and in CUDA for GPUs.

Importing the package registers all of them in the table of kernels (ops/kernel_table.py), which asks for it by name.
Without it torch's operations compute everything.
"""

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
