"""`--device-memory`: whether the rank with the highest peak fits, the exit code, and what would help."""

import re

import pytest

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.dry_run import device_fit
from megatron_ds.extensions.dry_run.device_fit import DeviceMemory, fit_text, remedies
from megatron_ds.extensions.dry_run.world_plan import plan_world
from megatron_ds.planning.run_plan import RULES
from megatron_ds.training.pretrain import KNOWN_NAMES, pretrain

pytestmark = pytest.mark.plan

JOB = (
    "--mock-data --vocab-size 512 --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 128 --micro-batch-size 2 --global-batch-size 16 --train-iters 2 --lr 1e-3 --bf16 "
    "--hidden-dropout 0 --attention-dropout 0 --dry-run"
).split()


def planned(*more, world_size=4):
    return plan_world(
        parse([*JOB, *more], world_size=world_size, known=KNOWN_NAMES, rules=RULES)
    )


def peak_of(*more):
    return planned(*more).worst.peak


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "--zero-stage 1 --tensor-model-parallel-size 2",
        "--zero-stage 3 --recompute-granularity full",
    ],
)
def test_every_remedy_is_the_plan_with_its_flags(layout):
    plan, words = planned(*layout.split()), layout.split()
    found = remedies(plan)
    assert found and all(remedy.peak < 0.99 * plan.worst.peak for remedy in found)
    assert [remedy.peak for remedy in found[:-1]] == sorted(
        remedy.peak for remedy in found[:-1]
    )
    for remedy in found:
        assert peak_of(*words, *remedy.change.split()) == remedy.peak


def test_what_is_already_so_is_no_remedy():
    changes = " ".join(
        remedy.change
        for remedy in remedies(
            planned(
                "--zero-stage",
                "3",
                "--recompute-granularity",
                "full",
                "--micro-batch-size",
                "1",
                "--offload-optimizer",
                "cpu",
                "--tensor-model-parallel-size",
                "4",
                "--sequence-parallel",
            )
        )
    )
    assert not re.search(
        "zero-stage|recompute|micro-batch|offload|tensor|sequence", changes
    )


def test_a_remedy_that_the_rules_refuse_is_not_listed(monkeypatch):
    plan = planned()
    refused = {device_fit.TENSOR: 3}
    monkeypatch.setattr(device_fit, "FINDERS", (lambda config, grid: refused,))
    assert not remedies(plan)


@pytest.mark.parametrize(
    "factor, word", [(0.4, "does not fit"), (1.02, "barely fits"), (2, "fits")]
)
def test_the_sentence_has_both_numbers(factor, word):
    plan = planned()
    line, *more = fit_text(plan, DeviceMemory(int(plan.worst.peak * factor), "a test"))
    assert (
        line.startswith(f"device: {word}: rank 0 needs about")
        and "MiB of" in line
        and "(a test)" in line
    )
    assert bool(more) == (word == "does not fit")
    assert not list(fit_text(plan, None))


def test_the_exit_code_is_1_if_a_rank_does_not_fit(capsys):
    peak = peak_of()
    words = [*JOB, "--world-size", "4", "--device-memory"]
    assert pretrain([*words, str(2 * peak)]) == 0
    assert "device: fits" in capsys.readouterr().out
    assert pretrain([*words, str(peak // 2)]) == 1
    page = capsys.readouterr().out
    assert "device: does not fit" in page and re.search(
        "2.[01][0-9] times as much", page
    )
    assert "what would help" in page and re.search(
        r"--micro-batch-size 1 +peak .* (fits|does not fit)", page
    )
    assert pretrain([*words, "80 apples"]) == 2


def test_the_memory_of_this_machines_gpu_is_the_default(monkeypatch):
    class Found:
        name, total_memory = "GPU of a test", 80 * 10**9

    config = parse(JOB, world_size=4)
    assert device_fit.device_memory(config, "cuda") is None
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Found)
    assert device_fit.device_memory(config, "cuda") == DeviceMemory(
        80 * 10**9, "the GPU of a test of this machine"
    )
    assert device_fit.device_memory(config, "cpu") is None
    with pytest.raises(ConfigError, match="is not a size"):
        device_fit.device_memory(
            parse([*JOB, "--device-memory", "lots"], world_size=4), "cuda"
        )
