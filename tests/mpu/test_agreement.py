"""Ranks that were started with other options, versions or variables: all end with the same error."""

import json
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest

from megatron_ds.config import compared_values as compared
from megatron_ds.config.compared_values import compared_values
from megatron_ds.config.parse import read
from megatron_ds.config.run import all_options
from megatron_ds.errors import DataError, MegatronDSError
from megatron_ds.mpu.agreement import require_agreement
from tests.harness.pretraining import TINY
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

# flag → values of the two ranks; None: the flag is not given, "": it is given without a value
PAIRS = {
    "--lr": ("1e-3", "1e-2"),
    "--seed": ("1", "2"),
    "--global-batch-size": ("4", "8"),
    "--micro-batch-size": ("1", "2"),
    "--hidden-dropout": ("0", "0.5"),
    "--attention-dropout": ("0", "0.1"),
    "--weight-decay": ("0", "1"),
    "--optimizer": ("adam", "lion"),
    "--num-attention-heads": ("2", "4"),
    "--bf16": (None, ""),
    "--save-interval": ("2", "3"),
    "--zero-stage": ("1", "2"),
    "--num-layers": ("2", "4"),
    "--hidden-size": ("32", "64"),
    "--ffn-hidden-size": ("32", "64"),
    "--train-iters": ("6", "7"),
    "--min-lr": ("1e-5", "1e-4"),
    "--lr-decay-style": ("cosine", "linear"),
    "--lr-warmup-iters": ("1", "2"),
    "--clip-grad": ("1.0", "0.5"),
    "--adam-beta1": ("0.9", "0.8"),
    "--adam-beta2": ("0.999", "0.95"),
    "--adam-eps": ("1e-8", "1e-6"),
    "--eval-iters": ("0", "1"),
    "--log-interval": ("1", "2"),
    "--make-vocab-size-divisible-by": ("1", "128"),
    "--init-method-std": ("0.02", "0.01"),
    "--seq-length": ("16", "8"),
    "--tensor-model-parallel-size": ("1", "2"),
    "--pipeline-model-parallel-size": ("1", "2"),
    "--context-parallel-size": ("1", "2"),
    "--rotary-base": ("10000", "500000"),
    "--position-embedding-type": ("rope", "alibi"),
    "--normalization": ("LayerNorm", "RMSNorm"),
    "--swiglu": (None, ""),
    "--untie-embeddings-and-output-weights": (None, ""),
    "--recompute-granularity": ("full", "selective"),
    "--check-for-nan": ("continue", "stop"),
    "--kernels": ("torch", "auto"),
    "--exit-interval": ("2", "3"),
    "--distributed-timeout-minutes": ("3", "4"),
    "--overlap-comm": ("", None),
    "--num-experts": ("2", "4"),
}
PER_HOST_ONLY = {
    "profiler.profile_dir",  # paths, files of logs, and the rate of reading
    "curriculum.curriculum_cluster_path",
    "data.data_args_path",
    "data.data_cache_path",
    "data.data_path",
    "data.merge_file",
    "data.num_workers",
    "data.per_split_data_args_path",
    "data.test_data_path",
    "data.tokenizer_model",
    "data.train_data_path",
    "data.valid_data_path",
    "train.eval_tasks_include_path",
    "data.vocab_file",
    "services.comet_experiment_name",
    "services.comet_offline_dir",
    "services.comet_project",
    "services.comet_workspace",
    "logging.csv_monitor_dir",
    "logging.metrics_path",
    "services.mlflow_experiment",
    "services.mlflow_run_name",
    "services.mlflow_tracking_uri",
    "services.otel_enabled",
    "services.otel_service_name",
    "logging.progress_bar",
    "logging.tensorboard_dir",
    "services.wandb_entity",
    "services.wandb_exp_name",
    "services.wandb_group",
    "services.wandb_project",
    "services.wandb_save_dir",
    "parallel.pipeline_costs_path",
    "plan.dry_run",
    "plan.rank",
    "profiler.autotuning_metric_path",
    "profiler.flops_profiler_output_file",
    "profiler.memory_snapshot_path",
    "zero.nvme_block_size",
    "zero.nvme_io",
    "zero.nvme_queue_depth",
    "zero.nvme_threads",
    "zero.offload_nvme_path",
    "zero.offload_param_nvme_path",
}


def config_of(flag, value):
    words = [] if value is None else [flag]
    if value:
        words.append(value)
    return read([*TINY, "--mock-data", "--save", "run", *words], world_size=2)


def errors_of(facts, problem="they differ", advice="Do better."):
    """The text of the error of each rank or None. facts: of each rank, or the error of reading them."""

    def run(rank, world):
        def read_facts():
            if isinstance(facts[rank], Exception):
                raise facts[rank]
            return facts[rank]

        try:
            require_agreement(
                world.group("world", range(len(facts)), rank),
                read_facts,
                problem,
                advice,
            )
        except MegatronDSError as error:
            assert error.on_all_ranks
            return str(error)

    return run_ranks(len(facts), run)


@pytest.mark.parametrize("flag", PAIRS)
def test_ranks_with_different_options_all_end_and_name_the_option_and_both_values(flag):
    configs = [config_of(flag, value) for value in PAIRS[flag]]
    one, other = errors_of([compared_values(config) for config in configs])
    assert one == other
    found = re.fullmatch(
        r"they differ: (--\S+) is (\S+) on rank 0 on \S+( \(.*\))?, and (\S+) on rank 1 on "
        r"\S+( \(.*\))?(; .*)?\. Do better\.",
        one,
    )
    [option] = [o for o in all_options().values() if o.flag == found[1]]
    assert flag in (option.flag, *option.flags, *option.switches)
    assert [found[2], found[4]] == [
        text_of(config.get(option.path)) for config in configs
    ]


def text_of(value):
    return value if isinstance(value, str) else json.dumps(value)


def test_every_option_is_compared_unless_it_is_declared_to_be_of_one_host():
    assert {
        path for path, option in all_options().items() if option.per_host
    } == PER_HOST_ONLY
    found = compared_values(read([*TINY, "--mock-data"]))
    flags = {option.flag for option in all_options().values() if not option.per_host}
    assert flags == {name for name in found if name.startswith("--")}


def test_the_source_of_a_value_is_named_and_equal_ranks_go_on():
    assert errors_of([{"--lr": (1, "--lr")}, {"--lr": (1, "gpt.yaml:3")}]) == [
        None,
        None,
    ]
    text = errors_of([{"--lr": (1, "--lr")}, {"--lr": (2, "gpt.yaml:3")}])[0]
    assert (
        f"--lr is 1 on rank 0 on {platform.node()} (from --lr), and 2 on rank 1" in text
    )
    assert "(from gpt.yaml:3)" in text


def test_of_many_ranks_the_one_that_differs_is_shown_beside_one_of_the_majority():
    texts = errors_of([{"--lr": (rank in (0, 3), "")} for rank in range(5)])
    assert len(set(texts)) == 1
    assert "--lr is false on rank 1 on" in texts[0] and "true on rank 0 on" in texts[0]
    assert "2 of 5 ranks differ from rank 1" in texts[0]


def test_a_value_that_one_rank_lacks_and_an_unreadable_one_are_errors_of_all():
    texts = errors_of([{}, {"the tokenizer": ("a", "")}])
    assert texts[0] == texts[1] and "the tokenizer is absent on rank 0" in texts[0]
    texts = errors_of([{}, DataError("no corpus")])
    assert texts == ["rank 1: no corpus"] * 2


def test_versions_edited_sources_and_variables_are_compared(monkeypatch, tmp_path):
    config = config_of("--lr", None)
    here = compared_values(config, env={})
    variable = compared_values(config, env={"NVIDIA_TF32_OVERRIDE": "1"})
    assert "NVIDIA_TF32_OVERRIDE is not set on rank 0" in errors_of([here, variable])[0]
    monkeypatch.setattr(compared, "__version__", "0.0.1")
    older = compared_values(config, env={})
    assert re.search(
        r"the version of megatron_ds is \S+ on rank 0 .*, and 0\.0\.1 on rank 1",
        errors_of([here, older])[0],
    )
    monkeypatch.undo()
    package = tmp_path / "megatron_ds"
    original = Path(compared.__file__).parents[1]
    shutil.copytree(original, package, ignore=shutil.ignore_patterns("*.pyc"))
    monkeypatch.setattr(
        compared, "__file__", str(package / "config" / "compared_values.py")
    )
    assert compared_values(config, env={}) == here
    with (package / "ops" / "adam.py").open("a") as file:
        file.write("# edited\n")
    compared._hash_of_source.cache_clear()
    edited = compared_values(config, env={})
    assert "the hash of megatron_ds's source files is" in errors_of([here, edited])[0]


def test_compiled_modules_and_the_script_are_compared(monkeypatch, tmp_path):
    config = config_of("--lr", None)
    here = compared_values(config, env={})
    # The package without a module that a compiler made.
    name = "the compiled modules of megatron_ds"
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "_adam.cpython-311.so").touch()
    monkeypatch.setattr(compared, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    assert compared_values(config, env={})[name] == (["_adam"], "")
    monkeypatch.undo()
    # Another script of the same name.
    script = tmp_path / "train.py"
    script.write_text("loss = 1")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    one = compared_values(config, env={})
    assert one != here
    script.write_text("loss = 2")
    other = compared_values(config, env={})
    assert "the hash of the script is" in errors_of([one, other])[0]
    # A program that pip made for this installation.
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", f"{sys.prefix}/bin/run", raising=False
    )
    assert compared_values(config, env={})["the hash of the script"] == ("none", "")
