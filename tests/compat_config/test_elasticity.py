"""`compute_elastic_config` against DeepSpeed's own results.

The golden rows are [section, world size, return_microbatch, result or name of the error] of DeepSpeed 0.17.5, with
WORLD_SIZE=16, over sections drawn at random.
"""

import json
from pathlib import Path

import pytest

import megatron_ds as deepspeed
from megatron_ds.compat.deepspeed.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
)

pytestmark = pytest.mark.plan

ROWS = json.loads(
    (Path(__file__).parents[1] / "golden/elasticity.json").read_text(encoding="utf-8")
)
# Where DeepSpeed ends by an error without a helpful text, this package names the value.
OURS = {
    "ValueError": {"ElasticityConfigError"},  # a micro-batch above the largest batch
    "ZeroDivisionError": {"ElasticityConfigError"},  # return_microbatch alone
    "TypeError": {"ElasticityIncompatibleWorldSize", "ElasticityError"},  # no size
}


def result(section: dict, world_size: int, returns_microbatch: bool):
    try:
        found = compute_elastic_config(
            {"elasticity": section}, "0.17.5", world_size, returns_microbatch
        )
    except ElasticityError as error:
        return type(error).__name__
    return list(found)


def test_results_are_those_of_deepspeed(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    values = 0
    for section, world_size, returns_microbatch, theirs in ROWS:
        mine = result(section, world_size, returns_microbatch)
        values += isinstance(theirs, list)
        if isinstance(theirs, list):
            assert mine == theirs, (section, world_size)
        else:
            assert mine in OURS.get(theirs, {theirs}), (section, world_size)
    assert values > 50


def test_a_batch_that_many_numbers_of_gpus_divide():
    section = {
        "enabled": True,
        "max_train_batch_size": 10000,
        "micro_batch_sizes": [8, 12, 16, 17],
        "min_gpus": 32,
        "max_gpus": 1500,
        "version": 0.1,
    }
    batch, sizes = deepspeed.elasticity.compute_elastic_config({"elasticity": section})
    assert batch == 9792 and len(sizes) == 23
    for size in sizes:
        assert any(batch % (size * micro) == 0 for micro in (8, 12, 16, 17))


@pytest.mark.parametrize(
    "values, error",
    [
        ({"enabled": False}, "is not enabled"),
        ({"micro_batch_sizes": 4}, "it is a list of integers"),
        ({"micro_batch_sizes": [0]}, "it is a list of integers"),
        ({"min_gpus": 0}, "it is at least 1"),
        ({"min_gpus": 9, "max_gpus": 4}, "is below min_gpus"),
        ({"version": 0.3}, "0.1 and 0.2 are known"),
        ({"version": 0.1, "model_parallel_size": 2}, "without model parallelism"),
    ],
)
def test_wrong_values_are_named(values, error):
    section = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}
    with pytest.raises(ElasticityConfigError, match=error):
        compute_elastic_config({"elasticity": section | values}, world_size=2)


def test_a_world_size_that_is_not_valid_is_an_error():
    section = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}
    config = {"elasticity": section | {"version": 0.1}}
    with pytest.raises(ElasticityIncompatibleWorldSize, match=r"Valid are \[1, 2, 4\]"):
        compute_elastic_config(config, world_size=3)
