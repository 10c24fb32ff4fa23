"""A pipe or a device in place of a file that a user names: no command waits for it, or reads it without end.

The flags are those that the commands declare: each that takes text is given a pipe that no process writes to, and a
device of zeros. A child that waits is killed after a minute, and one that takes a gigabyte more memory has a
MemoryError, which is exit code 1.
"""

import argparse
import os
import resource
import signal
import stat
import sys
from functools import cache
from pathlib import Path

import pytest

import megatron_ds.training.pretrain  # noqa: F401  before the forks
from megatron_ds import commands
from megatron_ds.config.run import all_options
from megatron_ds.config.sources.config_files import LARGEST
from megatron_ds.errors import DataError
from megatron_ds.extensions.tokenizers.file_tokenizers import HuggingFaceTokenizer
from megatron_ds.extensions.tokenizers.special_tokens import special_tokens
from tests.harness.deaths import forked
from tests.harness.limits import HUNG

pytestmark = pytest.mark.processes

MORE_MEMORY = 1 << 30  # bytes
MODEL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
    "--global-batch-size 1 --train-iters 1 --lr 1e-3"
).split()
# What a command needs besides, so that it comes to the file.
BEFORE = {
    "plan": MODEL,
    "prepare-cache": MODEL,
    "launch": ["--num_gpus", "1", "--dry-run"],
    "schedule": ["--output", "x.svg"],
}
# What a flag needs besides.
TOKENIZERS = {
    "--tokenizer-model": ["--tokenizer-type", "HFTokenizer"],
    "--vocab-file": ["--tokenizer-type", "BertWordPieceLowerCase"],
    "--merge-file": ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "x"],
}
NULL_TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
# Commands without flags of their own, whose process becomes another program.
REPLACED = ("as-deepspeed",)
LAST = {"launch": ["pretrain_gpt.py", *MODEL, "--mock-data", "--vocab-size", "9"]}


class Declared(BaseException):
    """A command has declared its flags. parser: which has them"""


@cache
def actions_of(command):
    """What the parser of a command declares."""

    def stop(parser, *_, **__):
        raise Declared(parser)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_known_args"):
            patch.setattr(argparse.ArgumentParser, name, stop)
        patch.setattr("megatron_ds.cli.Arguments.parse_args", stop)
        try:
            commands._function_of(commands.COMMANDS[command])(["--x"])
        except Declared as declared:
            return declared.args[0]._actions
    raise AssertionError(f"{command} declares no flags")


def takes_text(action):
    """Whether a flag of argparse takes a text of any kind, such as a path."""
    is_number = action.type in (int, float)
    return action.nargs != 0 and not is_number and action.choices is None


def cases():
    """(command, flag) of all flags that may name a file; "" for arguments without one."""
    for command, about in commands.COMMANDS.items():
        if about.module == commands.PRETRAIN or command in REPLACED:
            continue
        for action in filter(takes_text, actions_of(command)):
            yield command, max(action.option_strings, key=len, default="")
    yield "plan", "--config"
    yield "plan", "--deepspeed_config"
    for option in all_options().values():
        if option.kind is str and not option.choices:
            # A plan opens no data.
            yield ("prepare-cache" if option.section == "data" else "plan"), option.flag


def required_of(command, flag):
    """Words for the other flags without which a command ends before it looks at this one."""
    if command in ("plan", "launch", "prepare-cache"):
        return []
    words = []
    for action in actions_of(command):
        is_other = flag not in action.option_strings and "type" not in action.dest
        if action.required and is_other and (flag or action.option_strings):
            words += [*action.option_strings[-1:], "x"]
    return words


def code_of(folder, command, flag, path):
    """The exit code of the command, and what it prints; a negative number for the signal that ended it."""
    words = [*BEFORE.get(command, ()), *required_of(command, flag)]
    if command in ("plan", "preprocess", "prepare-cache"):
        words += TOKENIZERS.get(flag, NULL_TOKENIZER)
    words += [flag, str(path)] if flag else [str(path)]
    words += LAST.get(command, [])
    output = folder / "output"

    def run():
        os.chdir(folder)
        shown = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(shown, descriptor)
        sys.stdout = sys.stderr = open(shown, "w", buffering=1)
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        most = pages * resource.getpagesize() + MORE_MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        signal.alarm(HUNG)
        try:
            commands.main([command, *words])
        except SystemExit as end:
            os._exit(end.code or 0)

    status = os.waitpid(forked(run), 0)[1]
    shown = output.read_text(errors="replace")
    return os.waitstatus_to_exitcode(status), shown


def make_device(path):
    """A device of zeros. Commands that write replace files, and root may replace /dev/zero: it is never given."""
    if os.geteuid():
        path.symlink_to("/dev/zero")
        return
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")


@pytest.mark.parametrize("make", [os.mkfifo, make_device])
@pytest.mark.timeout(3600)
def test_no_flag_waits_for_a_pipe_or_reads_a_device_to_its_end(tmp_path, make):
    wrong = []
    for number, (command, flag) in enumerate(cases()):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder / "special")
        code, shown = code_of(folder, command, flag, folder / "special")
        if code not in (0, 2):
            wrong.append(f"{command} {flag}: {code} {shown[-300:]}")
    assert not wrong, "\n".join(wrong)


SIX = [
    ("plan", "--config"),
    ("plan", "--deepspeed_config"),
    ("prepare-cache", "--data-args-path"),
    ("prepare-cache", "--per-split-data-args-path"),
    ("launch", "--hostfile"),
]


@pytest.mark.parametrize("command, flag", SIX)
def test_the_refusal_names_the_flag(tmp_path, command, flag):
    os.mkfifo(tmp_path / "pipe")
    code, shown = code_of(tmp_path, command, flag, tmp_path / "pipe")
    assert code == 2 and "is not a regular file" in shown and flag in shown, shown


def test_a_configuration_of_many_megabytes_is_refused_at_once(tmp_path):
    """PyYAML takes most of a second for a megabyte, also of comments."""
    path = tmp_path / "config.yaml"
    path.write_bytes(b"#" + b"x" * 20_000_000 + b"\nnum_layers: 1\n")
    code, shown = code_of(tmp_path, "plan", "--config", path)
    assert code == 2 and f"at most {LARGEST:,} are read" in shown, shown


@pytest.mark.parametrize(
    "name, read",
    [
        ("tokenizer.json", HuggingFaceTokenizer),
        ("tokenizer_config.json", special_tokens),
    ],
)
def test_a_pipe_in_the_folder_of_a_tokenizer_is_refused(tmp_path, name, read):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}.* is not a regular file"):
        read(tmp_path)


def test_a_page_about_a_file_that_cannot_be_read_is_refused(tmp_path):
    code, shown = code_of(tmp_path, "report", "", "/proc/self/mem")
    assert code == 2 and "cannot be read" in shown, shown
