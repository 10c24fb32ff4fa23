"""Prompts of `megatron-ds generate`: what a file has, and what is refused before a text is generated."""

import io
import json

import pytest
import torch

from megatron_ds.console import escape_unknown
from megatron_ds.data.tokenizers.base import NullTokenizer
from megatron_ds.errors import ConfigError, DataError, DeviceMemoryError
from megatron_ds.extensions.generation import generate_text
from megatron_ds.extensions.generation.cached_keys import CachedKeys
from megatron_ds.extensions.generation.saved_flags import saved_flags

pytestmark = pytest.mark.plan

ODD = "1\u2028 2\x0b 3\x85"  # separators of lines elsewhere


class Checked:
    """A generator of a model with eight positions."""

    max_length = 8

    def check(self, request):
        """Takes all requests."""


class Model:
    tokenizer = NullTokenizer(50)
    ends = frozenset([50])


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["prompts.txt", "prompts", "prompts.jsonl"])
def test_a_line_ends_with_a_line_feed_alone_and_a_byte_order_mark_is_no_text(
    tmp_path, name, mark
):
    path = tmp_path / name
    lines = [ODD, "4 5"]
    if name.endswith(".jsonl"):
        lines = [json.dumps({"prompt": ODD}, ensure_ascii=False), '{"prompt": "4 5"}']
    path.write_bytes(f"{mark}{lines[0]}\r\n\n{lines[1]}".encode())
    assert generate_text.read_prompts(path) == [ODD, "4 5"]


@pytest.mark.parametrize(
    "line, why",
    [
        ("{", "line 2: not JSON"),
        ('{"text": "a"}', "line 2: no key 'prompt'; it has 'text'"),
        ('{"prompt": 5}', "line 2: 'prompt' is int, not text"),
        ('{"prompt": "\\ud800"}', "line 2: 'prompt' holds half a surrogate pair"),
        ("[" * 100_000, "line 2: not readable JSON: nested too deep"),
        (b"\xff", "line 2: not UTF-8"),
    ],
)
def test_a_line_without_a_prompt_is_named(tmp_path, line, why):
    path = tmp_path / "prompts.jsonl"
    text = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"prompt": "a"}\n' + text)
    with pytest.raises(DataError, match=why):
        generate_text.read_prompts(path)


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
@pytest.mark.parametrize("content", [None, b"", b"\n \n"])
def test_a_file_without_prompts_is_an_error(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=name):
        generate_text.read_prompts(path)


def shown(*flags):
    args, _ = generate_text.parse_arguments(["--load", "x", *flags])
    generate_text.show(args, Model, Checked())


def test_the_prompt_that_cannot_be_continued_is_named():
    with pytest.raises(ConfigError, match=r"prompt 2 of 2: .* of 9 tokens leaves 0 of"):
        shown("--prompt", "1", "--prompt", "1 2 3 4 5 6 7 8 9")
    with pytest.raises(DataError, match="prompt 1 of 2: NullTokenizer reads decimal"):
        shown("--prompt", "a", "--prompt", "1")


def test_texts_are_not_shorter_than_asked_for():
    with pytest.raises(ConfigError, match="leaves 3 of 8 .* at least 4 are asked"):
        shown("--prompt", "1 2 3 4 5", "--min-new-tokens", "4")


@pytest.mark.parametrize(
    "flags, why",
    [
        (["--min-new-tokens", "65"], "65 is not between 0 and --max-new-tokens 64"),
        (["--min-new-tokens", "-1"], "-1 is not between 0 and"),
        (["--stop", "a\udcff"], "is not UTF-8 at character 1"),
        (["--system", "a"], "--system is about a --chat"),
        (["--chat-template", "a"], "--chat-template is about a --chat"),
        (["--json", "--logprobs", "-1"], "--logprobs -1: use 0 or more"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(flags, why):
    args, rest = generate_text.parse_arguments(["--load", "x", "--prompt", "1", *flags])
    with pytest.raises(ConfigError, match=why):
        generate_text.check(args, rest)


def test_a_misspelt_flag_gets_the_nearest_one_of_the_command_or_is_left_to_the_run():
    given = ["--load", "x", "--prompt", "1"]
    with pytest.raises(ConfigError, match="'--max-new-tokens'"):
        generate_text.parse_arguments([*given, "--max-new-token=5"])
    for flag in ("--tensor-model-paralel-size", "--zero-stage", "--no-bf16"):
        assert generate_text.parse_arguments([*given, flag])[1] == [flag]


def test_a_terminal_without_a_character_shows_an_escape():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    escape_unknown(stream)
    print("\u00c4", end="", file=stream, flush=True)
    assert stream.buffer.getvalue() == b"\\xc4"


def test_an_iteration_of_a_folder_without_runs_is_left_to_the_load(tmp_path):
    assert "--load" in saved_flags(tmp_path, 1, [], 1)


def test_keys_that_do_not_fit_are_an_error_with_their_size():
    cached = CachedKeys(10**13, 8)
    k = torch.zeros(1, 1, 2, 4)
    with pytest.raises(DeviceMemoryError, match="of 8 tokens take .* --batch-size"):
        cached.write("layer", k, k, torch.zeros(1, dtype=torch.int64))
