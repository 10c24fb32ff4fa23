"""What a conversion writes in the format of this package."""

import pytest
import torch

from megatron_ds.compat.conversion.files.stored_tensor import StoredTensor
from megatron_ds.compat.conversion.own_format import _piece
from megatron_ds.mpu.param_spec import Init, ParamSpec

pytestmark = pytest.mark.plan


def test_state_has_the_shape_of_its_parameter_or_is_one_number():
    """Such as the running mean of the trust ratio of 1-bit LAMB."""
    spec = ParamSpec("output.weight", (3, 4), Init("zeros"))
    for kind, values in (
        ("exp_avg", torch.randn(3, 4)),
        ("mean_ratio", torch.randn(1)),
    ):
        stored = StoredTensor(
            tuple(values.shape), values.dtype, lambda values=values: values, "here"
        )
        piece = _piece(spec, kind, stored)
        assert (
            piece.spec.shape == tuple(values.shape)
            and piece.tensor.numel() == values.numel()
        )
        assert torch.equal(piece.make(), values)
