"""What is learned of a conversation, compared with what the templates of TRL mark with {% generation %}.

TRL installs chat templates of published models, and of each a form for training in which what the model writes is
marked. Here the marks are removed, the answers are found without them, and both are compared. White space behind the
end of a turn is learned by TRL and not here: inference stops before it. All other differences are named below, with
the templates that have them; a template without a name in `DIFFERENCES` differs nowhere.
"""

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest

from megatron_ds.extensions.chat.answer_spans import Answers, find_answers
from megatron_ds.extensions.chat.content_exchange import AnswerNotFound
from megatron_ds.extensions.chat.conversation import Conversation, conversation_of
from megatron_ds.extensions.chat.template import ChatTemplate, TemplateRefusal
from tests.harness.chats import LOOKUP

pytestmark = pytest.mark.plan

FOLDER = files("trl") / "chat_templates"
SUFFIX = "_training.jinja"
NAMES = sorted(
    path.name.removesuffix(SUFFIX)
    for path in FOLDER.iterdir()
    if path.name.endswith(SUFFIX)
)
VALUES = {f"{kind}_token": f"<{kind}>" for kind in ("bos", "eos", "pad", "unk")}

# TRL marks a header, or a beginning of it, that the generation prompt gives.
GIVEN = "given by the prompt"
# TRL marks what the template writes once behind the whole conversation, after the end of the last turn.
END_OF_TEXT = "end of the text behind the end of the turn"
# The model stops a call with the token that opens the result; TRL leaves it out.
OPENED_RESULT = "token that opens a result"
# The prompt behind a result is bare, and the text has a header, which the model has to write; TRL leaves it out.
BARE_PROMPT = "header that the prompt does not give"
# The template drops the calls: an answer without its call is no example, and is refused here.
DROPPED_CALLS = "calls are not in the text"
# The template prints the result of a tool in the middle of an answer, which is no span.
INTERRUPTED = "a result is inside of the answer"
DIFFERENCES: dict[str, set[str]] = {
    "cohere": {DROPPED_CALLS},
    "cohere2": {DROPPED_CALLS},
    "deepseek_r1_distill": {GIVEN, DROPPED_CALLS},
    "deepseekv3": {GIVEN},
    "diffusion_gemma": {OPENED_RESULT, BARE_PROMPT, INTERRUPTED},
    "gemma": {DROPPED_CALLS},
    "gemma3": {DROPPED_CALLS},
    "gptoss": {GIVEN},
    "idefics3": {DROPPED_CALLS},
    "lfm2": {DROPPED_CALLS},
    "llama3": {DROPPED_CALLS},
    "llava_next": {DROPPED_CALLS},
    "muse_glimmer": {GIVEN},
    "nemotron_3_5_lightning": {GIVEN},
    "nemotron_3_nano": {GIVEN},
    "nemotron_3_super": {GIVEN},
    "nemotron_3_ultra": {GIVEN},
    "phi3": {END_OF_TEXT, DROPPED_CALLS},
    "phi3_5": {END_OF_TEXT, DROPPED_CALLS},
    "qwen2_5": {GIVEN},
    "qwen2_5_vl": {DROPPED_CALLS},
    "qwen3_5_nothink": {GIVEN},
    "qwen3_5_think": {GIVEN},
    "qwen3_6": {GIVEN},
    "qwen3_8": {GIVEN},
    "smolvlm": {DROPPED_CALLS},
}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str, thought: str = "", *questions: str) -> dict:
    """An answer with reasoning, and calls of a function with these questions."""
    message = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if questions:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": "abcdefghi",
                "function": {"name": "lookup", "arguments": {"q": question}},
            }
            for question in questions
        ]
    return message


def result(text: str) -> dict:
    return {
        "role": "tool",
        "name": "lookup",
        "tool_call_id": "abcdefghi",
        "content": text,
    }


SYSTEM = {"role": "system", "content": "Be kind."}
TWO_TURNS = [user("Hi"), said("Hello there"), user("Bye"), said("Fine.")]
CHATS: dict[str, list[dict]] = {
    "turns": TWO_TURNS,
    "a system prompt": [SYSTEM, *TWO_TURNS],
    "reasoning": [user("2+2?"), said("4", "two and two")],
    "reasoning in two turns": [
        *(user("2+2?"), said("4", "two and two")),
        *(user("1+1?"), said("2", "one and one")),
    ],
    "an empty answer": [user("Hi"), said(""), user("Bye"), said("Fine.")],
    "white space": [user(" Hi\n"), said("  Hello \n"), user("Bye"), said("Fine. ")],
    "equal words": [user("yes"), said("yes"), user("yes"), said("yes")],
}
CALLS: dict[str, list[dict]] = {
    "a call at the end": [user("Who?"), said("", "", "who")],
    "a call and its result": [
        *(user("Who?"), said("", "", "who")),
        *(result("seven"), said("Seven.")),
    ],
    "a call with a text": [
        *(SYSTEM, user("Who?"), said("Wait", "", "who")),
        *(result("seven"), said("Seven."), user("And?"), said("No.")),
    ],
    "two calls with reasoning": [
        *(user("Who?"), said("", "look first", "who"), result("seven")),
        *(said("", "look again", "what"), result("eight")),
        *(said("Both.", "done"), user("And?"), said("No.")),
    ],
}


def conversations() -> Iterator[tuple[str, Conversation]]:
    for name, messages in CHATS.items():
        yield name, conversation_of({"messages": messages})
    for name, messages in CALLS.items():
        yield name, conversation_of({"messages": messages, "tools": [LOOKUP]})


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), VALUES)


def without_marks(template: ChatTemplate) -> ChatTemplate:
    """The same text, not marked."""
    begin = re.sub(
        r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", template.source
    )
    end = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", begin)
    return ChatTemplate(end, VALUES)


def marks_of(
    marked: ChatTemplate, conversation: Conversation, text: str | None
) -> list[str] | None:
    """The texts that TRL marks, those that touch made one; None unless it renders this text.

    text: None for any
    """
    for form in conversation.forms():
        try:
            found, spans = marked.render_marked(form.messages, form.tools)
        except TemplateRefusal:
            continue
        if text in (None, found):
            return [part for part in texts_of(found, spans) if part]
    return None


def texts_of(text: str, spans: list[tuple[int, int]]) -> list[str]:
    """The texts of spans without the white space behind them; spans that touch are one."""
    texts: list[str] = []
    end = 0
    for start, stop in spans:
        if texts and start == end and stop > start:
            texts[-1] += text[start:stop]
        else:
            texts.append(text[start:stop])
        end = stop
    return [part.rstrip() for part in texts]


def difference(trl: str, ours: str, before: str, prompt: str) -> str | None:
    """The name of what differs between two learned texts.

    before: the text before ours.  prompt: what the model is given
    """
    if trl == ours:
        return None
    if trl.endswith(ours):
        given = trl.removesuffix(ours)
        # What TRL learns in addition is in the prompt, at its end or before thoughts that it opens.
        is_given = prompt.endswith(given) or prompt.startswith(before)
        assert is_given or given in prompt[-len(f"{given}<think>\n") :]
        return GIVEN
    if trl.startswith(ours):
        assert trl.removeprefix(ours).split() == ["<eos>"]
        return END_OF_TEXT
    if ours == f"{trl}<|tool_response>":
        return OPENED_RESULT
    assert ours == f"<|turn>model\n{trl}" and not prompt.endswith("<|turn>model\n")
    return BARE_PROMPT


def prompts_of(template: ChatTemplate, conversation: Conversation) -> list[str]:
    """What the model is given before each answer."""
    for form in conversation.forms():
        try:
            return [
                template.render_prompt(form.messages[:number], form.tools)
                for number, message in enumerate(form.messages)
                if message["role"] == "assistant"
            ]
        except TemplateRefusal:
            continue
    raise AssertionError("no form has prompts")


def refusal(error: AnswerNotFound, template: ChatTemplate, chat: Conversation) -> str:
    """The name of the reason why a conversation is refused that TRL trains on."""
    if "cannot be separated" in str(error):
        return INTERRUPTED
    texts = []
    for form in chat.forms():
        try:
            texts.append(template.render(form.messages))
        except TemplateRefusal:
            continue
    assert texts and not any("lookup" in text for text in texts), error
    return DROPPED_CALLS


def compared(
    answers: Answers, marks: list[str], prompts: list[str]
) -> Iterator[str | None]:
    ours = texts_of(answers.text, answers.spans)
    assert len(ours) == len(marks) == len(prompts)
    for mark, own, prompt, span in zip(marks, ours, prompts, answers.spans):
        yield difference(mark, own, answers.text[: span[0]], prompt)


@pytest.mark.parametrize("is_original", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_learned_as_the_marked_form_of_the_template_has_them(
    name, is_original
):
    """is_original: the template that the model came with, where it renders the text of the one for training."""
    marked = template_of(f"{name}_training")
    template = template_of(name) if is_original else without_marks(marked)
    found = set()
    count = 0
    for _, chat in conversations():
        try:
            answers = find_answers(template, chat)
        except AnswerNotFound as error:
            # What TRL refuses, too, is no difference.
            if not is_original and marks_of(marked, chat, None) is not None:
                found.add(refusal(error, template, chat))
            continue
        marks = marks_of(marked, chat, answers.text)
        assert is_original or marks is not None
        if marks is None:
            continue
        count += 1
        found.update(compared(answers, marks, prompts_of(template, chat)))
    named = DIFFERENCES.get(name, set())
    assert found - {None} <= named
    if not is_original:
        assert found - {None} == named and count >= 4


def test_every_named_template_is_installed():
    assert len(NAMES) >= 30 and set(DIFFERENCES) <= set(NAMES)


@pytest.mark.parametrize(
    "name, learned",
    [
        (
            "gptoss",
            [
                "<|channel|>final<|message|>Hello there<|end|>",
                "<|channel|>final<|message|>Fine.<|return|>",
            ],
        ),
        # The next turn begins with the token that ends this one; a tokenizer finds it.
        ("glm4moe", ["\n<think></think>\nHello there", "\n<think></think>\nFine."]),
        ("qwen3", ["Hello there<|im_end|>", "<think>\n\n</think>\n\nFine.<|im_end|>"]),
        ("llama3", ["Hello there<|eot_id|>", "Fine.<|eot_id|>"]),
        ("gemma", ["Hello there<end_of_turn>", "Fine.<end_of_turn>"]),
        ("phi3", ["Hello there<|end|>", "Fine.<|end|>"]),
        ("qwen2_5", ["Hello there<|im_end|>", "Fine.<|im_end|>"]),
    ],
)
def test_published_templates_learn_from_the_prompt_to_the_end_of_each_turn(
    name, learned
):
    answers = find_answers(template_of(name), conversation_of({"messages": TWO_TURNS}))
    assert [answers.text[start:stop] for start, stop in answers.spans] == learned
    assert answers.doubts == []
    assert len(answers.unended) == (2 if name == "glm4moe" else 0)


def test_a_model_learns_to_open_its_thoughts_unless_the_prompt_does():
    thoughtful = conversation_of({"messages": CHATS["reasoning"]})
    template = template_of("qwen3")
    answers = find_answers(template, thoughtful)
    (start, stop), *_ = answers.spans
    written = "<think>\ntwo and two\n</think>\n\n4<|im_end|>"
    assert answers.text[start:stop] == written
    # Without thinking the prompt has an empty block.
    plain = conversation_of({"messages": TWO_TURNS})
    silent = ChatTemplate(template.source, {**VALUES, "enable_thinking": False})
    answers = find_answers(silent, plain)
    learned = [answers.text[start:stop] for start, stop in answers.spans]
    assert learned == ["Hello there<|im_end|>", "Fine.<|im_end|>"]
