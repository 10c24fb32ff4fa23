"""DeepSpeed's names: each entry of the tables is an object of this package or gives advice; modules below
`megatron_ds` and below `deepspeed`; the page lists the names that give advice."""

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import megatron_ds
from megatron_ds.compat.deepspeed import advice
from megatron_ds.compat.deepspeed import modules as deepspeed_modules
from megatron_ds.compat.deepspeed.names import HERE, SAME
from megatron_ds.errors import ConfigError
from tests.harness.limits import HUNG
from tests.harness.warm import warm_environment

pytestmark = pytest.mark.plan

ROOT = Path(__file__).parents[2]
# What public programs that call deepspeed.initialize use most, beside initialize itself.
USED = """accelerator.get_accelerator accelerator.real_accelerator.get_accelerator get_accelerator
    DeepSpeedEngine DeepSpeedConfig add_config_arguments init_distributed log_dist zero.Init
    zero.GatheredParameters
    zero.ZeroParamStatus zero.register_external_parameter runtime.zero.GatheredParameters
    runtime.zero.partition_parameters.ZeroParamStatus runtime.zero.partition_parameters.GatheredParameters
    zero.partition_parameters.GatheredParameters zero.stage3.DeepSpeedZeroOptimizer_Stage3
    runtime.zero.stage3.estimate_zero3_model_states_mem_needs_all_live runtime.utils.see_memory_usage
    runtime.engine.DeepSpeedEngine runtime.lr_schedules.WarmupLR runtime.lr_schedules.VALID_LR_SCHEDULES
    runtime.dataloader.RepeatingLoader runtime.activation_checkpointing.checkpointing.checkpoint
    checkpointing.get_cuda_rng_tracker checkpointing.model_parallel_cuda_manual_seed checkpointing.configure
    utils.groups utils.logger utils.logging.logger utils.set_z3_leaf_modules utils.zero_to_fp32
    utils.RepeatingLoader utils.timer.SynchronizedWallClockTimer ops.adam.FusedAdam ops.adam.DeepSpeedCPUAdam
    ops.adam.cpu_adam.DeepSpeedCPUAdam ops.adam.fused_adam.FusedAdam ops.lion.FusedLion ops.lamb.FusedLamb
    ops.adagrad.DeepSpeedCPUAdagrad moe.layer.MoE moe.utils.is_moe_param
    moe.utils.split_params_into_different_moe_groups_for_optimizer comm.get_rank comm.comm.barrier
    sequence.layer.DistributedAttention checkpoint.utils.clone_tensors_for_torch_save OnDevice
    PipelineModule pipe.PipelineModule pipe.LayerSpec pipe.TiedLayerSpec PipelineEngine
    runtime.pipe.module.PipelineModule init_inference InferenceEngine default_inference_config tp_model_init
    inference.engine.InferenceEngine
    utils.init_on_device.OnDevice runtime.config.DeepSpeedConfigError monitor.monitor.MonitorMaster"""
ADVISED = """DualPipeVModule runtime.bf16_optimizer.BF16_Optimizer
    runtime.pipe.topology.PipelineParallelGrid zero.MiCS_Init
    runtime.zero.mics.MiCS_Init ops.op_builder.CPUAdamBuilder compression.compress.init_compression
    module_inject.replace_policy.HFBertLayerPolicy set_autotp_mode
    inference.config.DeepSpeedInferenceConfig ops.transformer.DeepSpeedTransformerLayer"""


def followed(name: str):
    """By attributes, as programs write it after `import megatron_ds as deepspeed`."""
    found = megatron_ds
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("module", HERE)
def test_every_name_of_the_table_is_an_object_of_this_package(module):
    at = importlib.import_module(f"megatron_ds.{module}".rstrip("."))
    for name in HERE[module]:
        found = getattr(at, name)
        assert not isinstance(found, deepspeed_modules._Placeholder), name
        assert name in dir(at) or module in (
            "",
            "comm",
            "accelerator",
            "utils",
            "zero",
            "checkpoint",
            "mpu",
        )


@pytest.mark.parametrize("module", SAME)
def test_every_module_with_the_names_of_another_is_importable(module):
    at, other = (
        importlib.import_module(f"megatron_ds.{path}")
        for path in (module, SAME[module])
    )
    for name in HERE.get(SAME[module], {}):
        assert getattr(at, name) is getattr(other, name)


@pytest.mark.parametrize("module", advice.ADVICE)
def test_every_name_that_is_not_available_raises_its_advice_when_it_is_called(module):
    at = importlib.import_module(f"megatron_ds.{module}".rstrip("."))
    for names, sentence in advice.ADVICE[module].items():
        for name in names.split():
            found = getattr(at, name)
            with pytest.raises(ConfigError) as error:
                found(1, key=2)
            assert str(error.value).endswith(sentence) and name in str(error.value)


# Each name in a process of its own: what one name imports would hide that another one cannot be found.
FOLLOWED = """
import os, sys
import megatron_ds
import megatron_ds.compat.engine, megatron_ds.compat.inference.engine
from megatron_ds.compat.deepspeed.modules import FacadeModule, _Placeholder

assert not any(isinstance(module, FacadeModule) for module in sys.modules.values())
for name in words:
    child = os.fork()
    if child == 0:
        found = megatron_ds
        try:
            for part in name.split("."):
                found = getattr(found, part)
            is_here = not isinstance(found, _Placeholder)
        except AttributeError as error:
            print(error, file=sys.stderr, flush=True)
            is_here = False
        os._exit(not is_here)
    if os.waitpid(child, 0)[1]:
        print(name)
print("followed", len(words))
"""


def test_names_that_programs_use_most_are_found_by_attributes_each_as_the_first():
    words = USED.split()
    done = run(f"words = {words}\n{FOLLOWED}", warm=False)
    assert done.stdout == f"followed {len(words)}\n", done.stdout + done.stderr


@pytest.mark.parametrize("name", ADVISED.split())
def test_names_that_are_not_available_can_be_imported_subclassed_and_compared(name):
    module, _, last = f"megatron_ds.{name}".rpartition(".")
    found = getattr(importlib.import_module(module), last)
    assert found is followed(name) and not isinstance(nn.Linear(1, 1), found)

    class Mine(found):
        pass

    with pytest.raises(ConfigError, match="is not available here: .+"):
        Mine()


def test_a_name_that_is_not_known_is_named_in_full():
    with pytest.raises(
        AttributeError, match=r"deepspeed\.runtime\.utils\.foo is not known here"
    ):
        _ = megatron_ds.runtime.utils.foo
    assert not hasattr(megatron_ds, "runtime_utils")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("megatron_ds.runtime.nothing")


def test_the_page_lists_each_package_and_name_that_gives_advice():
    page = (ROOT / "docs/use/engine.md").read_text(encoding="utf-8")
    missing = [package for package in advice.NOT_HERE if f"`{package}`" not in page]
    missing += [
        name
        for name in (
            "PipelineParallelGrid",
            "set_autotp_mode",
        )
        if f"`{name}`" not in page
    ]
    assert not missing


# ---------------------------------------------------------------------------- under the name deepspeed
def run(program: str, warm: bool = True) -> subprocess.CompletedProcess:
    """warm: nothing of what is tested depends on what has been imported before."""
    environment = dict(os.environ)
    if warm:
        environment = warm_environment(environment)
    return subprocess.run(
        ["python" if warm else sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=HUNG,
        env=environment,
    )


def test_libraries_that_import_deepspeed_by_name_get_this_package():
    done = run("""
import importlib.metadata, importlib.util, sys
import megatron_ds
megatron_ds.install_as_deepspeed()
megatron_ds.install_as_deepspeed()                      # a second call changes nothing
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.version("deepspeed") == "0.19.8"
import deepspeed, deepspeed.utils.logging
from deepspeed import DeepSpeedEngine
from deepspeed.ops.adam.fused_adam import FusedAdam
from deepspeed.runtime.zero.config import *
from deepspeed.utils import groups
assert deepspeed.__version__ == "0.19.8" and ZeroStageEnum.weights == 3
assert deepspeed.utils is megatron_ds.utils and DeepSpeedEngine is megatron_ds.compat.engine.Engine
import deepspeed.utils.groups as same
assert dir(same) == dir(groups) and groups._get_data_parallel_world_size() == 1
try:
    import deepspeed.nothing
except ModuleNotFoundError as error:
    print(error)
""")
    assert done.returncode == 0 and "deepspeed.nothing" in done.stdout, done.stderr


def test_it_refuses_where_deepspeed_itself_has_been_imported():
    done = run("""
import sys, types
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
sys.modules["deepspeed"].__file__ = "/site-packages/deepspeed/__init__.py"
import megatron_ds
megatron_ds.install_as_deepspeed()
""")
    assert done.returncode == 1
    assert (
        "has been imported already, from /site-packages/deepspeed/__init__.py"
        in done.stderr
    )


# ------------------------------------------------------------------------------------------- what they do
def test_partitions_are_even_and_balanced():
    assert megatron_ds.runtime.utils.partition_uniform(7, 3) == [0, 3, 5, 7]
    # The heaviest part of [2, 9, 4, 5] in three parts is 9 at best.
    assert megatron_ds.runtime.utils.partition_balanced([2, 9, 4, 5], 3) == [0, 1, 2, 4]
    assert megatron_ds.runtime.utils.partition_balanced([1] * 6, 3) == [0, 2, 4, 6]


def test_modules_are_made_on_a_device_with_a_number_format():
    with megatron_ds.OnDevice(dtype=torch.bfloat16, device="meta"):
        made = nn.Linear(2, 3)
    assert made.weight.is_meta and made.weight.dtype == torch.bfloat16
    assert (
        nn.Linear(2, 3).weight.dtype == torch.float32
        and not nn.Linear(2, 3).weight.is_meta
    )


def test_recomputation_draws_from_the_same_named_random_state():
    tracker = megatron_ds.checkpointing.get_cuda_rng_tracker()
    x = torch.ones(64, 7, requires_grad=True)

    def layer(value):
        with tracker.fork():
            return nn.functional.dropout(value * value, 0.5)

    gradients = []
    for recompute in (False, True):
        megatron_ds.checkpointing.model_parallel_cuda_manual_seed(5)
        out = megatron_ds.checkpointing.checkpoint(layer, x) if recompute else layer(x)
        after = tracker.get_states()
        gradients.append(torch.autograd.grad(out.sum(), x)[0])
        assert all(
            torch.equal(state, after[name])
            for name, state in tracker.get_states().items()
        )
    assert torch.equal(*gradients) and 0 < gradients[0].count_nonzero() < 64 * 7
    with (
        pytest.raises(ValueError, match="no random state 'other'"),
        tracker.fork("other"),
    ):
        pass
    tracker.reset()


def test_expert_parameters_get_groups_of_their_own_on_demand():
    shared, expert = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    expert.allreduce, expert.group_name = False, "ep_size_2"
    groups = megatron_ds.moe.utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": [shared, expert], "lr": 0.1}
    )
    assert [group["lr"] for group in groups] == [0.1, 0.1]
    assert groups[0]["params"][0] is shared and groups[1]["params"][0] is expert
    assert groups[1]["moe"] is True and groups[1]["name"] == "ep_size_2"


def test_leaf_modules_are_gathered_as_one_layer():
    from megatron_ds.compat.engine.module_specs import find_layers

    module = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    )
    outer = nn.ModuleDict({"a": module})
    assert len(find_layers(outer)) > 1
    assert megatron_ds.utils.set_z3_leaf_modules(outer, [nn.ModuleDict]) == [outer]
    assert [layer.module for layer in find_layers(outer)] == [outer]
    assert megatron_ds.utils.get_z3_leaf_modules(outer) == [outer]
    megatron_ds.utils.unset_z3_leaf_modules(outer, ["ModuleDict"])
    assert len(find_layers(outer)) > 1
    with pytest.raises(
        ConfigError, match="no module of the class Conv2d is in the model"
    ):
        megatron_ds.utils.set_z3_leaf_modules(outer, [nn.Conv2d])


COLLISIONS = """
import importlib
import megatron_ds.utils
from megatron_ds.compat.deepspeed.modules import canonical, load
from megatron_ds.compat.deepspeed.names import HERE

def package(path):
    return importlib.import_module(f"{NAME}.{path}".rstrip("."))

for word in words:
    path, _, name = word.rpartition(".")
    before = getattr(package(path), name)
    importlib.import_module(f"{NAME}.{word}")
    assert getattr(package(path), name) is before, word
    target = HERE.get(canonical(path), {}).get(name)
    if target:
        assert before is load(target), word
print("compared", len(words))
"""


def names_of_a_module_and_an_object():
    """ "utils.z3_leaf_module": packages of DeepSpeed whose `__init__` has an object named as a submodule."""
    root = Path(importlib.util.find_spec("deepspeed").submodule_search_locations[0])
    for init in root.rglob("__init__.py"):
        package = ".".join(init.parent.relative_to(root).parts)
        modules = {path.stem for path in init.parent.glob("*.py")}
        for node in ast.walk(ast.parse(init.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            for alias in node.names:
                if (name := alias.asname or alias.name) in modules:
                    yield f"{package}.{name}".lstrip(".")


@pytest.mark.parametrize("name", ["megatron_ds", "deepspeed"])
def test_a_name_stays_what_it_is_when_a_submodule_of_that_name_is_imported(name):
    found = sorted(
        word
        for word in set(names_of_a_module_and_an_object())
        if deepspeed_modules.is_module(word)
    )
    assert "utils.z3_leaf_module" in found
    begin = "import megatron_ds; megatron_ds.install_as_deepspeed()" * (
        name == "deepspeed"
    )
    done = run(f"words = {found}\n{begin}\n{COLLISIONS.replace('{NAME}', name)}")
    assert done.stdout == f"compared {len(found)}\n", done.stderr


def test_the_function_z3_leaf_module_is_called_under_each_spelling():
    """DeepSpeed's module has the same name."""
    import megatron_ds.utils.z3_leaf_module
    from megatron_ds.utils import z3_leaf_module
    from megatron_ds.utils.z3_leaf_module import z3_leaf_module as same

    module = torch.nn.Linear(2, 2)
    megatron_ds.utils.set_z3_leaf_module(module, True)
    assert z3_leaf_module is same is megatron_ds.utils.z3_leaf_module
    assert z3_leaf_module(module)
