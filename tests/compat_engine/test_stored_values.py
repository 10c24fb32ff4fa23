"""Values in run.json come back with their types, and nothing in them is executed."""

import json
import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.compat.engine import stored_values
from megatron_ds.compat.engine.stored_values import plain, restored
from megatron_ds.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.plan

TENSORS = [
    torch.get_rng_state(),
    torch.tensor(3),
    torch.zeros(0, 2),
    torch.tensor([1.5, -0.0, float("nan")]),
    torch.arange(6).view(2, 3).T,
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]),
]
ARRAYS = [
    np.arange(3),
    np.zeros((2, 0)),
    np.float64(0.1),
    np.int32(7),
    np.bool_(True),
    np.array("text"),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.datetime64("2026-01-02"),
    np.float32("inf"),
]
OTHERS = [
    None,
    True,
    3,
    2**80,
    0.1,
    -0.0,
    float("inf"),
    1 + 2j,
    "text",
    b"\x00\xff",
    [],
    (),
    (1, (2,)),
    {1, 2},
    frozenset({"a"}),
    {3: (1, 2)},
    {"tensor": 1},
    {None: {True: [(), {}]}},
    OrderedDict(b=1, a=2),
    Counter("aab"),
    Path("a/b"),
    torch.float16,
    torch.device("cpu"),
    torch.Size([2, 3]),
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text() | st.booleans(), inner)
    ),
)


def again(value):
    return restored(json.loads(json.dumps(plain(value))))


@pytest.mark.parametrize("value", TENSORS)
def test_tensors_come_back(value):
    found = again({"x": value})["x"]
    assert found.dtype == value.dtype and found.shape == value.shape
    torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)
    if value.is_floating_point() and value.numel():
        assert torch.equal(torch.signbit(found), torch.signbit(value))
    found.add_(
        1
    ) if found.dtype != torch.bool else found.logical_not_()  # it can be written to


@pytest.mark.parametrize("value", ARRAYS)
def test_arrays_and_numbers_of_numpy_come_back(value):
    found = again(value)
    assert (
        type(found) is type(value)
        and found.dtype == value.dtype
        and np.array_equal(found, value)
    )


@given(VALUES)
def test_plain_values_come_back(value):
    found = again(value)
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("value", OTHERS, ids=range(len(OTHERS)))
def test_other_values_come_back_with_their_types(value):
    found = again([value])
    assert repr(found) == repr([value]) and type(found[0]) is type(value)


def test_namespaces_and_random_states_come_back():
    args = again(
        {
            "args": Namespace(lr=0.1, betas=(0.9, 0.99)),
            "more": SimpleNamespace(a=np.int64(3)),
        }
    )
    assert (
        args["args"] == Namespace(lr=0.1, betas=(0.9, 0.99))
        and type(args["more"].a) is np.int64
    )
    counts = defaultdict(list, {1: [2]})
    assert again(counts) == counts and again(counts)[5] == []
    states = again({"python": random.getstate(), "numpy": np.random.get_state()})
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])


class Color(IntEnum):
    RED = 1


class Words(dict):
    pass


@pytest.mark.parametrize(
    "value, kind",
    [
        (print, "builtins.builtin_function_or_method"),
        (Color.RED, "Color"),
        (Words(), "Words"),
        (np.array([None]), "numpy.ndarray"),
        (np.zeros(2, dtype=[("a", "f4")]), "numpy.ndarray"),
        (torch.zeros(2).to_sparse(), "torch.Tensor"),
        (torch.zeros(2, device="meta"), "torch.Tensor"),
        (defaultdict(lambda: 0), "collections.defaultdict"),
        (torch.nn.Linear(1, 1), "Linear"),
        (object, "type"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value, kind):
    with pytest.raises(
        ConfigError,
        match=rf"client_state\['a'\]\[1\]\[2\].* is of type .*{kind}, which",
    ):
        plain({"a": [0, {2: value}]}, "client_state")


def test_a_state_that_is_too_large_or_contains_itself_is_refused(monkeypatch):
    monkeypatch.setattr(stored_values, "MOST_BYTES", 2**20)
    with pytest.raises(
        ConfigError, match=r"up to client_state\['b'\] have 2 MiB, .* at most 1 MiB"
    ):
        plain({"a": torch.zeros(2**17), "b": np.zeros(2**17 + 2**16)}, "client_state")
    loop = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="contains itself"):
        plain({"a": loop})


@pytest.mark.parametrize(
    "value",
    [
        {"eval": "1"},
        {"tensor": {"dtype": "load", "shape": [1], "data": "AAAA"}},
        {"a": 1, "b": 2},
        {"tuple": 3},
        {"tensor": {"dtype": "float32", "shape": [2**60], "data": "AAAA"}},
        {"bytes": "?"},
        {"dict": [[1]]},
        {"tensor": {"dtype": "float32", "shape": [-1], "data": "AAAA"}},
        {"defaultdict": ["eval", []]},
        {"array": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"dtype": "torch.load"},
        {"device": "shell"},
        {"namespace": [[1, 2]]},
        {"complex": "x"},
        {"size": [[]]},
    ],
)
def test_a_damaged_value_is_an_error_of_the_checkpoint(value):
    with pytest.raises(CheckpointError, match="run.json is damaged"):
        restored([value])
