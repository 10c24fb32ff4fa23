"""Results that are made from earlier ones: their forms are those that torch works out, their memory is their own."""

import pytest
import torch

from megatron_ds.host.known_results import KnownResults, result_of

pytestmark = pytest.mark.plan

ATEN = torch.ops.aten


class Counted:
    """An operation that counts how often it runs."""

    def __init__(self, function):
        self.function = function
        self._schema = function._schema
        self.py_kernels = function.py_kernels
        self.runs = 0

    def __call__(self, *args, **kwargs):
        self.runs += 1
        return self.function(*args, **kwargs)


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def forms(result):
    parts = [result] if isinstance(result, torch.Tensor) else result
    return [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in parts]


OPERATIONS = {
    "sum": (ATEN.add.Tensor, (meta(3, 4), meta(4, 3).t())),
    "norm": (ATEN.native_layer_norm.default, (meta(3, 4), [4], None, None, 1e-5)),
    "rows": (ATEN.index.Tensor, (meta(3, 4), [meta(2, dtype=torch.long)])),
    "parts": (ATEN.cat.default, ([meta(3, 4), meta(1, 4)],)),
    "format": (ATEN._to_copy.default, (meta(4, 3).t(),)),
}


@pytest.mark.parametrize("function, args", OPERATIONS.values(), ids=OPERATIONS)
def test_a_known_result_has_its_form_and_memory_of_its_own(function, args):
    counted = Counted(function)
    first = result_of(counted, args, {})
    second = result_of(counted, args, {})
    assert counted.runs == 1
    assert forms(first) == forms(second)
    assert type(first) is type(second)
    tensors = [*first, *second] if isinstance(first, tuple) else [first, second]
    storages = {t.untyped_storage()._cdata for t in tensors}
    assert len(storages) == len(tensors)


def test_an_operation_in_place_returns_its_tensor():
    counted = Counted(ATEN.lerp_.Tensor)
    for _ in range(2):
        x = meta(3)
        assert result_of(counted, (x, meta(3), meta(3)), {}) is x
    counted = Counted(ATEN.logaddexp.out)
    for _ in range(2):
        x = meta(3)
        assert result_of(counted, (meta(3), meta(3)), {"out": x}) is x
    assert counted.runs == 1


def test_an_argument_that_is_given_another_size_is_no_known_result():
    counted = Counted(ATEN.logaddexp.out)
    for _ in range(2):
        out = meta(0)
        assert result_of(counted, (meta(3), meta(3)), {"out": out}).shape == (3,)
    assert counted.runs == 2


@pytest.mark.parametrize(
    "function, args",
    [
        (ATEN.view.default, (meta(3, 4), [12])),
        (ATEN._unsafe_view.default, (meta(3, 4), [12])),
        (ATEN.add.Tensor, (torch.ones(2), torch.ones(2))),
    ],
    ids=["a view", "a view by another name", "values"],
)
def test_views_and_values_run_each_time(function, args):
    counted = Counted(function)
    for _ in range(2):
        result_of(counted, args, {})
    assert counted.runs == 2


def test_numbers_of_different_types_give_different_formats():
    x = meta(3, dtype=torch.long)
    with KnownResults():
        found = [(x * factor).dtype for factor in (2, 2.0, True) * 2]
    assert found == [torch.long, torch.float32, torch.long] * 2


def test_an_error_is_raised_each_time():
    for _ in range(2):
        with KnownResults(), pytest.raises(RuntimeError):
            meta(3) + meta(4)
