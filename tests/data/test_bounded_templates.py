"""A chat template from elsewhere ends within its limits, and leaves this process and its other threads alone."""

import json
import os
import signal
import threading

import pytest

from megatron_ds.errors import DataError
from megatron_ds.extensions.chat import bounded_renderer
from megatron_ds.extensions.chat.template import (
    MOST_BYTES,
    ChatTemplate,
    TemplateRefusal,
    find_template,
)
from tests.harness.chats import CHATML, write_tokenizer

pytestmark = pytest.mark.plan

HI = [{"role": "user", "content": "Hi é あ \ud83d"}]
MEMORY = "needs more than 320 MiB of memory"
SECONDS = "took more than 1 s of a processor"
DOUBLED = (
    "{% set ns = namespace(s='aaaa') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
)
HOSTILE = {
    "{{ 'a' * 10**10 }}": MEMORY,
    "{{ [0] * 10**9 }}": MEMORY,
    "{{ 'a'.center(9000000000) }}": MEMORY,
    "{{ 'a'.ljust(9000000000) }}": MEMORY,
    "{{ '7'.zfill(9000000000) }}": MEMORY,
    "{{ '%5000000000d' % 3 }}": MEMORY,
    "{{ '{:>5000000000}'.format(1) }}": MEMORY,
    "{{ [1, [2]] | tojson(indent=10**10) }}": MEMORY,
    "{{ ('a\n' * 1000) | indent(10**9) }}": MEMORY,
    "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}": MEMORY,
    DOUBLED: MEMORY,
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": SECONDS,
    "{{ lipsum(n=10**8) }}": SECONDS,
    "{{ 'a' * 40000000 }}": "40,000,000 characters, and at most 33,554,432",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ messages.__class__.__mro__ }}": "SecurityError",
    "{% include '/etc/passwd' %}": "no loader",
}


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_a_template_that_exceeds_a_limit_is_refused_and_the_next_one_is_rendered(
    source,
):
    with pytest.raises(TemplateRefusal, match=HOSTILE[source]):
        ChatTemplate(source).render(HI)
    # What JSON can hold passes unchanged, also half a surrogate pair.
    assert ChatTemplate("{{ messages[0].content }}").render(HI) == HI[0]["content"]


def test_other_threads_go_on_while_a_template_is_rendered():
    endless = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    )
    found = []

    def render() -> None:
        try:
            ChatTemplate(endless).render(HI)
        except TemplateRefusal as error:
            found.append(str(error))

    ChatTemplate("").render(HI)  # the process is there
    thread = threading.Thread(target=render)
    thread.start()
    for _ in range(1000):
        json.loads(json.dumps(HI))
    assert thread.is_alive()
    thread.join(120)
    assert len(found) == 1 and SECONDS in found[0]


@pytest.mark.rest
def test_a_process_that_was_killed_is_replaced():
    template = ChatTemplate("{{ messages | length }}")
    assert template.render(HI) == "1"
    first = bounded_renderer._running.child
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(60)
    with pytest.raises(TemplateRefusal, match="the process that renders it ended"):
        template.render(HI)
    assert template.render(HI) == "1"
    assert bounded_renderer._running.child.pid != first.pid


def test_a_forked_process_renders_in_a_process_of_its_own():
    template = ChatTemplate("{{ messages | length }}")
    assert template.render(HI) == "1"
    child = os.fork()
    if not child:
        code = 1
        try:
            code = int(template.render(HI * 3) != "3")
        finally:
            bounded_renderer._stop()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert template.render(HI * 2) == "2"


@pytest.mark.parametrize("name", ["chat_template", "tools", "add_generation_prompt"])
def test_a_value_cannot_take_the_place_of_the_template_or_its_arguments(name):
    """A request to a server may give values."""
    template = ChatTemplate(CHATML, {name: "{{ 'other' }}"})
    with pytest.raises(TemplateRefusal, match=f"'{name}' is not a value"):
        template.render_prompt(HI)


def test_values_and_messages_that_are_no_json_are_refused():
    with pytest.raises(TemplateRefusal, match="no JSON values"):
        ChatTemplate("", {"value": object()}).render(HI)
    with pytest.raises(TemplateRefusal, match="at most 67,108,864 are rendered"):
        ChatTemplate("").render([{"role": "user", "content": "a" * (65 << 20)}])


def test_a_template_is_read_from_a_regular_file_of_limited_size(tmp_path):
    folder = str(write_tokenizer(tmp_path / "t", None))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    large = tmp_path / "large"
    large.write_bytes(b" " * (MOST_BYTES + 1))
    for path, why in (
        (pipe, "is not a regular file"),
        ("/dev/full", "is not a regular file"),
        (large, f"at most {MOST_BYTES:,} are read"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(DataError, match=why):
            find_template(folder, str(path), {})
