"""Chats in the terminal: earlier lines are part of the prompt, and answers end where the template ends one."""

import os
import sys

import pytest

pytest.importorskip("jinja2", reason="jinja2 is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.chat.template import ChatTemplate
from megatron_ds.extensions.generation import generate_text
from megatron_ds.extensions.generation.chat_turns import ChatTurns
from megatron_ds.extensions.generation.typed_lines import typed_lines
from tests.evaluation.test_evaluation_harness import at_layout
from tests.generation.test_generator import led
from tests.harness.byte_tokenizer import END

pytestmark = pytest.mark.threads

LINES = "hello\n\nand more\n"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ end }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Letters:
    """Each character is a token; the last letter is special."""

    eod = 9999
    special_ids = frozenset([ord("~")])
    encode = staticmethod(lambda text: list(map(ord, text)))
    encode_batch = staticmethod(lambda texts: [list(map(ord, text)) for text in texts])


@pytest.mark.parametrize(
    "end, tokens, stops", [("~\n", {ord("~")}, ()), (" [end]\n", set(), ("[end]",))]
)
def test_an_answer_ends_where_the_template_ends_one(end, tokens, stops):
    turns = ChatTurns(
        ChatTemplate(TEMPLATE, {"end": end}), Letters, frozenset([Letters.eod, 5])
    )
    assert turns.stop_tokens == {Letters.eod, 5, *tokens} and turns.stops == stops
    prompt = turns.prompt([{"role": "user", "content": "a"}])
    assert "".join(map(chr, prompt)) == f"[user]a{end}[assistant]"


def test_earlier_lines_and_answers_are_part_of_the_prompt(
    tmp_path, monkeypatch, capsys
):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("{{ end }}", "<end>"))
    given = ["--load", "x", "--chat", "--greedy", "--max-new-tokens", "6"]
    args, _ = generate_text.parse_arguments(
        [*given, "--chat-template", str(template), "--system", "s"]
    )
    asked = []
    typed = tmp_path / "typed"
    typed.write_text(LINES)
    monkeypatch.setattr(sys, "stdin", typed.open())

    def chatting(model):
        def work(generator, _):
            add = generator.add

            def noted(request):
                asked.append(request)
                return add(request)

            generator.add = noted
            generate_text.chat(args, model, generator)

        return led(model.replica, work)

    at_layout("llama", "dp=1", chatting)
    first, second = asked
    assert all(END in request.stop_tokens for request in asked)
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert len(second.tokens) > len(first.tokens) + len("and more")
    assert len(capsys.readouterr().out) > 4


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "0 of --prompt"),
        (["--chat", "--prompt", "a"], "2 of --prompt"),
        (["--prompt", "a", "--logprobs", "2"], "printed with --json"),
        (["--prompt", "a", "--top-p", "3"], "top_p=3"),
        (["--prompt", "a", "--context-parallel-size", "2"], "keys of whole texts"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags, message):
    args, rest = generate_text.parse_arguments(["--load", "x", *flags])
    with pytest.raises(ConfigError, match=message):
        generate_text.check(args, rest)


def test_lines_come_from_a_pipe_while_something_else_happens():
    reading, writing = os.pipe()
    pieces = [b"fi", b"rst\n\n  second \nthi", b"rd"]

    def wait():
        if not pieces:
            os.close(writing)
        else:
            os.write(writing, pieces.pop(0))

    asked = []
    lines = typed_lines(reading, lambda: asked.append(1), wait)
    assert list(lines) == ["first", "second", "third"]
    assert len(asked) == 4
    os.close(reading)
