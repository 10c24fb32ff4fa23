"""The samples of an engine's curriculum are those of DeepSpeed's sampler, also after a restart."""

import hashlib

import numpy as np
import pytest

from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.data_efficiency.curriculum_sampler import CurriculumSampler
from megatron_ds.extensions.data_efficiency.difficulty_metrics import write_metric

pytestmark = pytest.mark.plan

TOTAL = 97
SEED = 7
STEPS = 40


def metric(name, kind, low, high, **schedule):
    """A block of "curriculum_metrics"; paths are relative to the folder of `write`."""
    return {
        "index_to_sample_path": f"{name}/{name}_index_to_sample",
        "index_to_metric_path": f"{name}/{name}_index_to_metric",
        "difficulty_type": kind,
        "clustering_type": "schedule_based",
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 20, "difficulty_step": 1},
    } | schedule


ROOT = {"total_curriculum_step": 15, "difficulty_step": 2, "root_degree": 2}
STAIRS = {"difficulty": [3, 5, 9], "max_step": [4, 11]}
CASES = {
    "value": {"words": metric("words", "value", 2, 9)},
    "percentile": {
        "words": metric(
            "words",
            "percentile",
            1,
            10,
            schedule_type="fixed_root",
            schedule_config=ROOT,
        )
    },
    "beside a length": {
        "length": metric("length", "value", 8, 64, clustering_type="single_cluster"),
        "words": metric(
            "words",
            "value",
            3,
            9,
            schedule_type="fixed_discrete",
            schedule_config=STAIRS,
        ),
    },
    "length alone": {
        "length": metric("length", "value", 8, 64, clustering_type="single_cluster")
    },
    "both": {
        "length": metric("length", "value", 40, 64),
        "words": metric("words", "percentile", 5, 10),
    },
    "custom": {
        "words": metric(
            "words", "value", 1, 9, schedule_type="custom", schedule_config={}
        )
    },
}
FUNCTIONS = {"words": lambda step: min(9, 2 + step // 5)}
# case → (hash of the batches of DeepSpeed 0.19.8's DeepSpeedDataSampler, the first samples of step 3), with 16
# samples in a batch, on one rank
GOLDEN = {
    "value": ("323006931fe77f1b", [46, 9, 28, 41]),
    "percentile": ("971d64f5c616184d", [62, 19, 76, 41]),
    "beside a length": ("5f3f4b3275b07d8b", [9, 2, 72, 41]),
    "length alone": ("fb83a5a8a523c9c6", [37, 17, 77, 75]),
    "both": ("f22f90b457719410", [45, 24, 19, 89]),
    "custom": ("f81efbdc31790d6d", [57, 28, 9, 1]),
}


def write(folder):
    """Values of two metrics for `TOTAL` samples."""
    random = np.random.default_rng(3)
    for name, values in (
        ("words", random.integers(1, 10, TOTAL)),
        ("length", random.integers(8, 65, TOTAL)),
    ):
        (folder / name).mkdir()
        write_metric(folder / name / name, values)


def placed(case, folder):
    """The blocks of a case, with whole paths."""
    return {
        name: {
            key: f"{folder}/{value}" if key.endswith("_path") else value
            for key, value in block.items()
        }
        for name, block in CASES[case].items()
    }


def digest(batches):
    return hashlib.sha256(repr(batches).encode()).hexdigest()[:16], batches[2][:4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("metrics")
    write(path)
    return path


def sampler_of(case, folder):
    sampler = CurriculumSampler(placed(case, folder), TOTAL, SEED)
    if case == "custom":
        sampler.set_schedules(FUNCTIONS)
    return sampler


@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_deepspeed(case, folder):
    sampler = sampler_of(case, folder)
    assert digest([sampler.draw(16) for _ in range(STEPS)]) == GOLDEN[case]


@pytest.mark.parametrize("case", ("both", "custom"))
def test_a_restarted_sampler_draws_the_same(case, folder):
    sampler = sampler_of(case, folder)
    drawn = [sampler.draw(16) for _ in range(9)]
    sampler.restart()
    assert [sampler.draw(16) for _ in range(9)] == drawn


def test_what_is_missing_is_named(folder):
    with pytest.raises(ConfigError, match="no function is set"):
        CurriculumSampler(placed("custom", folder), TOTAL, SEED).draw(16)
    with pytest.raises(ConfigError, match="no metric 'letters'; the config has words"):
        sampler_of("value", folder).set_schedules({"letters": len})
    with pytest.raises(DataError, match=f"sorts {TOTAL} samples"):
        CurriculumSampler(placed("value", folder), TOTAL + 1, SEED)
    blocks = placed("value", folder)
    blocks["words"]["min_difficulty"] = 0
    with pytest.raises(DataError, match="admits no sample at step 1"):
        CurriculumSampler(blocks, TOTAL, SEED).draw(16)
