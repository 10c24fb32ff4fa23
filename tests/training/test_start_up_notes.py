"""Lines of the start that tell apart what looks alike: kernels of gradients, weights that one rank does not
quantize, workers of 1-bit optimizers with other tokens, and the flag whose folder is missing."""

import logging
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from megatron_ds.compat.conversion import convert_checkpoint
from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.startup.startup_text import dropout_text, queues_text
from megatron_ds.models import MODELS, build_stage, stage_modules
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.ops.kernel_table import Operation, kernels_text
from megatron_ds.training.pretrain import pretrain
from megatron_ds.training.run_checkpoint import log_other_workers

pytestmark = pytest.mark.plan

JOB = (
    "--mock-data --vocab-size 64 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3"
).split()


def test_the_start_names_the_hardware_queues_of_a_gpu():
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert queues_text({name: "1"}, "cpu") == queues_text({name: "32"}, "cuda") == ""
    assert queues_text({name: "1"}, "cuda").startswith(
        f"{name} is 1: streams that share"
    )
    assert "is not set, which means 8:" in queues_text({}, "cuda")
    assert "set it to 32" in queues_text({}, "cuda")


def test_the_log_names_the_kernels_that_ran():
    """Some calls of an operation may run one implementation, others another."""
    ran = {
        "gelu": {"c++"},
        "product": {"torch"},
        "affine": {"torch"},
        "norm": {"torch", "c++"},
    }
    text = kernels_text(ran)
    assert text == "kernels: gelu c++, norm c++ or torch; affine, product by torch"


def test_the_first_step_of_a_run_names_its_kernels(capfd):
    """Operations in the log are those that the step called."""
    called = set()
    choose = Operation.choice

    def choice(operation, *arguments, **named):
        called.add(operation.name)
        return choose(operation, *arguments, **named)

    with patch.object(Operation, "choice", choice):
        assert pretrain([*JOB, "--swiglu", "--eval-iters", "0"]) == 0
    said = capfd.readouterr()
    (line,) = re.findall(r"kernels: (.*)", said.out + said.err)
    listed = {name.split()[0] for name in re.split("[,;] ", line)}
    assert listed == called and {"swiglu", "product", "adamw"} <= listed
    assert "gelu" not in listed


QUANTIZED = (
    "--zero-stage 3 --zero-quantized-weights --tensor-model-parallel-size 2".split()
)


def test_one_data_parallel_rank_notes_that_it_does_not_quantize():
    one, two = (parse([*JOB, *QUANTIZED], world_size=ranks) for ranks in (2, 4))
    [(name, why)] = one.without_effect.items()
    assert "zero-quantized-weights" in name and "numbers differ" in why
    assert not one.zero.zero_quantized_weights
    assert not two.without_effect and two.zero.zero_quantized_weights


@pytest.mark.parametrize(
    "optimizer, before, now, logs",
    [
        ("onebit_lamb", ["p2p"], "a2a", True),
        ("onebit_lamb", ["p2p"], "all_gather", False),
        ("onebit_adam", ["a2a"], "p2p", True),
        ("adam", ["p2p"], "a2a", False),
    ],
)
def test_workers_with_other_tokens_are_logged_when_a_run_resumes(
    optimizer, before, now, logs, caplog
):
    config = parse(
        [
            *JOB,
            "--optimizer",
            optimizer,
            "--context-parallel-size",
            "2",
            "--cp-comm-type",
            now,
            *(["--freeze-step", "2"] if "onebit" in optimizer else []),
        ],
        world_size=2,
    )
    with caplog.at_level(logging.WARNING):
        log_other_workers({"parallel": {"cp_comm_type": before}}, config)
    assert bool(caplog.messages) == logs
    assert all(
        f"--cp-comm-type was {before[0]} and is {now}" in line
        for line in caplog.messages
    )


@pytest.mark.parametrize("flag", ["--offload-param-nvme-path", "--offload-nvme-path"])
def test_a_folder_that_cannot_be_made_is_named_by_the_flag_that_was_given(flag):
    with pytest.raises(
        ConfigError,
        match=f"/dev/null is not a folder. Give another folder with {flag}, or",
    ):
        parse(
            [
                *JOB,
                *"--zero-stage 3 --offload-param nvme".split(),
                flag,
                "/dev/null/folder",
            ],
            world_size=1,
        )


def test_a_build_that_takes_long_is_not_silent(monkeypatch, caplog):
    now = iter(range(0, 1000, 6))
    monkeypatch.setattr(stage_modules.time, "monotonic", lambda: float(next(now)))
    config = parse([*JOB, "--num-layers", "6"], world_size=1)
    with caplog.at_level(logging.INFO):
        build_stage(MODELS["gpt"](config.model, ParallelContext()))
    lines = [line for line in caplog.messages if line.startswith("built ")]
    assert (
        len(lines) >= 3
        and lines[0].endswith("layers")
        and len(set(lines)) == len(lines)
    )


def test_verify_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(convert_checkpoint, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match="Nothing was written. Run pip install 'megatron_ds.verify.'"
    ):
        convert_checkpoint.run_tool(
            ["--load", str(tmp_path), "--save", str(tmp_path / "new"), "--verify"]
        )
    assert not (tmp_path / "new").exists()


def test_the_start_names_the_cost_of_attention_dropout_on_a_gpu():
    with_dropout, without = (
        SimpleNamespace(model=SimpleNamespace(attention_dropout=p)) for p in (0.1, 0.0)
    )
    assert dropout_text(with_dropout, "cuda").startswith(
        "--attention-dropout 0.1 needs"
    )
    assert dropout_text(with_dropout, "cpu") == dropout_text(without, "cuda") == ""
