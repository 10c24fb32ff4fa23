"""`deepspeed.runtime.zero.config`: the JSON's block as an object, with DeepSpeed's keys, defaults and checks."""

from pathlib import Path

import pytest
from megatron_ds.runtime.zero.config import DeepSpeedZeroConfig, get_zero_config
from megatron_ds.runtime.zero.leaf_module_config import (
    DEFAULT_LEAF_MODULE_CLASSES,
    DeepSpeedZeroLeafModuleConfig,
)
from megatron_ds.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)

from megatron_ds.errors import ArgumentError, ConfigError

pytestmark = pytest.mark.plan

theirs = pytest.importorskip("deepspeed.runtime.zero.config")
BLOCKS = [
    {},
    {"stage": 3},
    {"stage": 3, "stage3_max_live_parameters": 7.0, "overlap_comm": "auto"},
    {"stage": 3, "max_reuse_distance": 5e6, "offload_param": {"device": "cpu"}},
    {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True},
    {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}},
    {"stage": 3, "offload_optimizer": {"ratio": 0.3, "pipeline_read": True}},
    {"stage": 2, "cpu_offload": True},
    {"stage": 2, "cpu_offload": False},
    {"stage": 3, "cpu_offload_param": True},
    {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True},
    {"leaf_module": {"classes": ["a.B", "a.B"], "names": "layer"}},
    {"leaf_module": {"name_suffixes": ["experts"]}},
]
# DeepSpeed's former keys stay attributes of its object.
FORMER = (
    "cpu_offload",
    "cpu_offload_param",
    "stage3_gather_fp16_weights_on_model_save",
    "zenflow",
)
# Keys that the installed version has no more.
OLDER = ("mics_hierarchical_params_gather", "mics_shard_size", "zeropp_loco_param")
REFUSED = [
    ({"stage": 4}, "stage is 4, not one of 0, 1, 2, 3"),
    ({"stages": 1}, "has no key 'stages'. Its keys are stage, "),
    ({"sub_group_size": 1.5}, "sub_group_size is 1.5, not a whole number"),
    ({"sub_group_size": -1}, "sub_group_size is -1, not a number from 0 on"),
    ({"sub_group_size": "x"}, "sub_group_size is 'x', not a number"),
    ({"overlap_comm": 3}, "overlap_comm is 3, not true or false"),
    ({"offload_param": {"device": "disk"}}, "device is 'disk', not one of none, cpu"),
    ({"offload_param": 3}, "offload_param is 3, not a block"),
    ({"leaf_module": {"classes": 3}}, "classes is 3, not a text or a list of texts"),
    ({"offload_optimizer": {"ratio": 2}}, "ratio is 2, not a number between 0 and 1"),
    ({"zenflow": {}}, "ZenFlow is not available here"),
]
CONTRADICTIONS = [
    ({"stage": 2, "offload_optimizer": {"ratio": 0.5}}, "ratio is 0.5 at stage 2"),
    ({"compute_grad_norm": False}, "compute_grad_norm is false at stage 0"),
    ({"cpu_offload": True, "offload_optimizer": {}}, "are both given"),
]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_values_and_defaults_are_those_of_deepspeed(block):
    expected = theirs.DeepSpeedZeroConfig(**block).model_dump(mode="json")
    wanted = {key: value for key, value in expected.items() if key not in FORMER}
    here = _as_json(DeepSpeedZeroConfig(**block).model_dump())
    assert {key: v for key, v in here.items() if key not in OLDER} == wanted


def _as_json(value):
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, Path) else value


@pytest.mark.parametrize("block, message", REFUSED)
def test_an_unknown_key_or_value_is_refused_with_what_is_known(block, message):
    with pytest.raises(ConfigError) as error:
        DeepSpeedZeroConfig(**block)
    assert message in str(error.value)


@pytest.mark.parametrize("block, message", CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused(block, message):
    with pytest.raises(ArgumentError, match=message):
        DeepSpeedZeroConfig(**block)


def test_an_attribute_is_checked_when_it_is_set():
    config = DeepSpeedZeroConfig(stage=1)
    config.stage = 2
    assert config.stage == 2
    with pytest.raises(ConfigError, match="stage is 'two'"):
        config.stage = "two"
    with pytest.raises(ConfigError, match="has no key 'stge'"):
        config.stge = 3


def test_inner_blocks_are_objects_of_their_own():
    leaf = DeepSpeedZeroLeafModuleConfig(classes="my.Class")
    config = DeepSpeedZeroConfig(leaf_module=leaf, offload_param={})
    assert config.leaf_module is leaf and leaf.classes == ["my.Class"]
    assert config.offload_param == DeepSpeedZeroOffloadParamConfig()
    # A change of one object's list is no change of the defaults.
    DeepSpeedZeroConfig().leaf_module.classes.append("more")
    assert DeepSpeedZeroConfig().leaf_module.classes == DEFAULT_LEAF_MODULE_CLASSES


def test_an_offloaded_optimizer_overlaps_where_reading_or_writing_does():
    make = DeepSpeedZeroOffloadOptimizerConfig
    assert not make().pipeline
    assert make(pipeline_read=True).pipeline and make(pipeline_write=True).pipeline


def test_the_block_of_a_whole_json():
    assert get_zero_config({}).stage == 0
    assert get_zero_config({"zero_optimization": False}).stage == 0
    assert get_zero_config({"zero_optimization": {"stage": 2}}).stage == 2
    former = get_zero_config({"zero_optimization": True, "allgather_size": 1000})
    assert (former.stage, former.allgather_bucket_size) == (1, 1000)
