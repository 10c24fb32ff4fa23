"""Lines of the start that tell apart what looks alike: kernels of gradients, weights that one rank does not
quantize, workers of 1-bit optimizers with other tokens, and the flag whose folder is missing."""

import logging

import pytest
import torch

from megatron_ds.commands import convert_checkpoint
from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.models import MODELS, build_stage, stage_modules
from megatron_ds.mpu.context import ParallelContext
from megatron_ds.ops import product
from megatron_ds.ops.cpu import compiled_addition, compiled_product
from megatron_ds.ops.kernel_table import kernels_text
from megatron_ds.training.run_checkpoint import log_other_workers

pytestmark = pytest.mark.plan

JOB = (
    "--mock-data --vocab-size 64 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3"
).split()


@pytest.mark.skipif(
    bool(compiled_product.reason_against(*compiled_product.NAMES))
    or not compiled_addition.extension(),
    reason="not compiled for this processor",
)
def test_sums_into_fp32_gradients_are_listed_by_their_own_dtype():
    names = [product.add_product_.name, product.add_narrow_.name]
    text = kernels_text(torch.device("cpu"), torch.bfloat16, names, torch.float32)
    assert text == "kernels: add_narrow_ c++, add_product_ c++"
    text = kernels_text(torch.device("cpu"), torch.bfloat16, names, torch.bfloat16)
    assert text == "kernels: add_narrow_, add_product_ by torch"


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
def test_a_missing_folder_is_named_by_the_flag_that_was_given(flag):
    with pytest.raises(
        ConfigError, match=f"does not exist. Give another with {flag}, or"
    ):
        parse(
            [
                *JOB,
                "--zero-stage",
                "3",
                "--offload-param",
                "nvme",
                flag,
                "/no/such/folder",
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
