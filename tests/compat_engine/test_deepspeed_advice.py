"""The advice in place of names that are not available, compared with what the package has."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from megatron_ds.commands import COMMANDS
from megatron_ds.compat.config.deepspeed_json import known_keys
from megatron_ds.compat.config.dialects import FORK_READERS
from megatron_ds.compat.config.unsupported import FAMILIES, FLAGS, KEYS
from megatron_ds.compat.deepspeed.advice import ADVICE, NOT_HERE
from megatron_ds.compat.deepspeed.names import HERE
from megatron_ds.compat.deepspeed.pipe_schedule import (
    BackwardPass,
    ForwardPass,
    TrainSchedule,
)
from megatron_ds.config.sources.flags import spellings
from megatron_ds.extensions.corpora.preprocess_flags import CONVERSATIONS
from megatron_ds.extensions.launch.command import parser

pytestmark = pytest.mark.plan

REPOSITORY = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")
ROWS = [
    (path, names, text) for path, of in ADVICE.items() for names, text in of.items()
]
ADVICES = " ".join([*NOT_HERE.values(), *(text for *_, text in ROWS)])
# The answers to flags and keys that have no option.
ANSWERS = " ".join(
    f"{answer.note} {answer.refusal}"
    for table in (FLAGS, FAMILIES, KEYS)
    for answer in table.values()
)


@pytest.mark.parametrize("text", [ADVICES, ANSWERS], ids=["advice", "answers"])
def test_advice_names_commands_flags_and_pages_that_exist(text):
    commands = set(re.findall(r"megatron-ds ([a-z][a-z0-9-]*)", text))
    assert commands and commands <= set(COMMANDS)
    flags = set(FLAG.findall(text))
    of_launch = set(FLAG.findall(parser().format_help()))
    accepted = {flag for flag, answer in FLAGS.items() if answer.note}
    here = {*spellings(), *FORK_READERS, *of_launch, *CONVERSATIONS}
    known = {*here, *accepted, "--deepspeed_config"}
    assert flags and flags <= known
    pages = set(re.findall(r"docs/[\w/]+\.md", text))
    assert pages and all((REPOSITORY / page).is_file() for page in pages)


def test_advice_names_objects_and_keys_that_exist():
    for inner in re.findall(r"(?:megatron_ds|deepspeed)((?:\.\w+)+)", ADVICES):
        parent, _, name = f"megatron_ds{inner}".rpartition(".")
        found = getattr(importlib.import_module(parent), name)
        # A placeholder of a name that is missing has a sentence.
        assert isinstance(found, ModuleType) or not hasattr(found, "sentence"), inner
    parts = {part for key in known_keys() for part in key.split(".")}
    values = {"OneBitAdam", "Muon", "nvme"}
    assert set(re.findall(r'"(\w+)"', ADVICES)) <= parts | values


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
