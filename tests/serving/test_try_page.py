"""The page at / in a browser: its texts are those of the endpoints, and keys and buttons do what they say."""

import json
from dataclasses import replace

import pytest

from megatron_ds.extensions.serving.try_page import page
from tests.harness.chromium import chromium
from tests.harness.toy_generator import ToyGenerator, serving, until

pytestmark = pytest.mark.processes

CHAT = "/v1/chat/completions"
IS_READY = "!document.getElementById('send').hidden"
TEXTS = "[...document.querySelectorAll('.text')].map(each => each.textContent)"
NOTES = "document.querySelector('.message:last-child .notes').textContent"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def served():
    with serving(ToyGenerator(max_length=500)) as running:
        yield running


def fill(browser, **values):
    """Fill fields of the settings."""
    for name, value in values.items():
        place = f"document.getElementById('fields').elements[{json.dumps(name)}]"
        browser.run(f"{place}.value = {json.dumps(value)}")


def send(browser, text):
    """Type a text, press Enter and wait for the end of the answer."""
    browser.type(text)
    browser.press("Enter")
    browser.until(IS_READY)


def answer_to(served, *messages, **asked):
    """What the endpoint answers to messages, which begin with the user's."""
    roles = ("user", "assistant") * len(messages)
    listed = [{"role": r, "content": c} for r, c in zip(roles, messages)]
    if system := asked.pop("system", ""):
        listed.insert(0, {"role": "system", "content": system})
    body = {"messages": listed, "temperature": 0, **asked}
    status, answer, _ = served.ask("POST", CHAT, body)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]


@pytest.mark.quick
def test_the_page_is_one_file_and_escapes_the_name():
    with serving() as served:
        status, content, headers = served.ask("GET", "/")
        assert status == 200 and headers["Content-Type"].startswith("text/html")
        assert "http" not in content and " src=" not in content and "{{" not in content
        name = "</script><b>{{model}}"
        named = page(replace(served.model, name=name, template=None))
        assert "<b>" not in named and named.count("</script>") == 2
        facts = named.partition('id="model">')[2].partition("</script>")[0]
        assert json.loads(facts) == {"name": name, "max_length": 64, "chat": False}


def test_a_conversation_is_kept_and_an_answer_made_again(browser, served):
    browser.open(served.service.url)
    fill(browser, temperature="0", max_tokens="9", system="Be brief")
    send(browser, "Hi")
    first = answer_to(served, "Hi", system="Be brief", max_tokens=9)
    assert browser.run(TEXTS) == ["Hi", first]
    send(browser, "More")
    second = answer_to(served, "Hi", first, "More", system="Be brief", max_tokens=9)
    assert browser.run(TEXTS) == ["Hi", first, "More", second]
    assert "tokens in" in browser.run(NOTES)
    fill(browser, max_tokens="5")
    browser.click("Regenerate")
    browser.until(IS_READY)
    shorter = answer_to(served, "Hi", first, "More", system="Be brief", max_tokens=5)
    assert browser.run(TEXTS) == ["Hi", first, "More", shorter]
    # Copying, and a new conversation.
    browser.run(
        "navigator.clipboard.writeText = async text => { window.copied = text; }"
    )
    browser.click("Copy")
    assert browser.run("window.copied") == shorter
    browser.click("New chat")
    send(browser, "Hi")
    again = answer_to(served, "Hi", system="Be brief", max_tokens=5)
    assert browser.run(TEXTS) == ["Hi", again]


def test_escape_stops_an_answer_which_ends_its_text(browser, served):
    browser.open(served.service.url)
    served.generator.gate.clear()
    browser.type("Hi")
    browser.press("Enter")
    until(lambda: served.generator.running)
    assert browser.run("document.getElementById('send').hidden")
    browser.press("Escape")
    browser.until(IS_READY)
    until(lambda: not served.generator.running)
    assert browser.run(NOTES).endswith("Stopped")
    # A question without an answer is not part of what follows.
    served.generator.gate.set()
    fill(browser, temperature="0", max_tokens="5")
    send(browser, "Yes")
    expected = answer_to(served, "Yes", max_tokens=5)
    assert browser.run(TEXTS) == ["Hi", "", "Yes", expected]


def test_errors_are_shown_with_a_second_try(browser, served):
    browser.open(served.service.url)
    fill(browser, temperature="0", max_tokens="600")
    send(browser, "Hi")
    assert "A text has at most 500 tokens" in browser.run(NOTES)
    fill(browser, max_tokens="5")
    browser.click("Try again")
    browser.until(IS_READY)
    assert browser.run(TEXTS) == ["Hi", answer_to(served, "Hi", max_tokens=5)]
    # A value that no request can have is named by the browser, and nothing is sent.
    fill(browser, temperature="-1")
    browser.type("More")
    browser.press("Enter")
    assert len(browser.run(TEXTS)) == 2
    assert browser.run("document.getElementById('settings').open")
    # An error within a stream, and a server that has left.
    fill(browser, temperature="0")
    served.generator.failure = RuntimeError("rank 1 exited")
    browser.click("Send")
    browser.until(IS_READY)
    assert "rank 1 exited" in browser.run(NOTES)
    served.service.finish(1)
    browser.click("Try again")
    browser.until(IS_READY)
    assert "does not answer" in browser.run(NOTES)


def test_without_a_template_texts_are_continued(browser):
    with serving(ToyGenerator(max_length=500), template=None) as served:
        browser.open(served.service.url)
        assert not browser.run("document.getElementById('kinds').offsetParent")
        assert not browser.run("document.getElementById('system').offsetParent")
        fill(browser, temperature="0", max_tokens="7")
        browser.type("Once")
        browser.press("Enter", shift=True)
        send(browser, "Upon")
        asked = {"max_tokens": 7, "temperature": 0}
        new = served.complete(prompt="Once\nUpon", **asked)["choices"][0]["text"]
        assert browser.run(TEXTS) == ["Once\nUpon" + new]
        browser.click("Continue this")
        browser.press("Enter")
        browser.until(IS_READY)
        text = "Once\nUpon" + new
        more = served.complete(prompt=text, **asked)["choices"][0]["text"]
        assert browser.run(TEXTS) == [text, text + more]


def test_with_a_template_texts_can_be_continued_too(browser, served):
    browser.open(served.service.url)
    browser.click("Continue a text")
    fill(browser, temperature="0", max_tokens="7")
    send(browser, "Once")
    asked = {"max_tokens": 7, "temperature": 0}
    new = served.complete(prompt="Once", **asked)["choices"][0]["text"]
    assert browser.run(TEXTS) == ["Once" + new]
