"""The advice in place of names that are not available, compared with what the package has."""

import re

import pytest

from megatron_ds.commands import COMMANDS
from megatron_ds.compat.deepspeed.advice import ADVICE, NOT_HERE
from megatron_ds.compat.deepspeed.names import HERE
from megatron_ds.compat.deepspeed.pipe_schedule import (
    BackwardPass,
    ForwardPass,
    TrainSchedule,
)

pytestmark = pytest.mark.plan

ROWS = [
    (path, names, text) for path, of in ADVICE.items() for names, text in of.items()
]
TEXTS = [*NOT_HERE.values(), *(text for *_, text in ROWS)]


def test_advice_names_commands_that_exist():
    named = re.findall(r"megatron-ds ([a-z][a-z0-9-]*)", " ".join(TEXTS))
    assert {"launch", "env"} <= set(named) <= set(COMMANDS)


@pytest.mark.parametrize("package", NOT_HERE)
def test_a_package_that_a_command_replaces_names_the_command(package):
    last = package.rpartition(".")[2]
    for name in COMMANDS:
        if last.startswith(f"{name}_") or last in (name, f"{name}er"):
            assert f"megatron-ds {name}" in NOT_HERE[package]


def test_a_package_of_which_a_part_is_here_names_the_part_or_what_replaces_it():
    assert "flops_profiler" in NOT_HERE["profiling"]
    assert "megatron_ds.comm.log_summary" in str(ADVICE["utils.comms_logging"])
    assert "--bind_cores_to_rank" in str(ADVICE["utils.numa"])


def test_no_advice_is_given_for_a_name_that_is_here():
    stale = [
        f"{path}.{name}"
        for path, names, _ in ROWS
        for name in names.split()
        if name in HERE.get(path, {})
    ]
    assert not stale


@pytest.mark.parametrize("micro_batches, stages", [(1, 1), (3, 2), (5, 4), (2, 3)])
def test_each_stage_of_the_training_schedule_works_once_on_each_micro_batch(
    micro_batches, stages
):
    """And what a stage sends in a tick is what its neighbour receives in that tick."""
    ticks = [list(TrainSchedule(micro_batches, stages, s)) for s in range(stages)]
    assert {len(of) for of in ticks} == {2 * (micro_batches + stages - 1)}
    for s, of_stage in enumerate(ticks):
        kinds = [type(command) for tick in of_stage for command in tick]
        assert kinds.count(ForwardPass) == kinds.count(BackwardPass) == micro_batches
        if s + 1 < stages:
            for here, there in zip(of_stage, ticks[s + 1]):
                names = lambda tick: [command.name for command in tick]
                sends = names(here).count("SendActivation")
                assert sends == names(there).count("RecvActivation")
                assert names(there).count("SendGrad") == names(here).count("RecvGrad")
