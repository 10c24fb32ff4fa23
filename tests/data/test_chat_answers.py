"""What is learned of a conversation: the answers, all of them, and nothing else."""

import json
import random
import re

import pytest

from megatron_ds.errors import DataError
from megatron_ds.extensions.chat.answer_spans import (
    NO_HEADER,
    NO_REASONING,
    find_answers,
)
from megatron_ds.extensions.chat.content_exchange import AnswerNotFound
from megatron_ds.extensions.chat.conversation import conversation_of
from megatron_ds.extensions.chat.loss_masks import NO_END, ChatEncoder
from megatron_ds.extensions.chat.template import ChatTemplate, load_template
from megatron_ds.extensions.tokenizers.file_tokenizers import HuggingFaceTokenizer
from tests.harness.chats import (
    CHATML,
    ENDLESS,
    ENDS_UNMARKED,
    MARKED,
    MISMARKED,
    PROMPT,
    RESULTS_OF_CALLS,
    TEMPLATES,
    THINKING,
    TRIMMED,
    random_conversation,
    random_record,
    write_tokenizer,
)

pytestmark = pytest.mark.plan

CASES = 40
OTHERS = re.compile("USER|SYSTEM|RESULT")
# A turn of the assistant, with the tags of thoughts, which no prompt gives.
TURN = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.S)


def chat(*turns: str, **more) -> dict:
    """Question, answer, question, …"""
    roles = ("user", "assistant")
    messages = [
        {"role": roles[number % 2], "content": text}
        for number, text in enumerate(turns)
    ]
    return {"messages": messages, **more}


def learned(template: str, record: dict) -> list[str]:
    text, spans, *_ = find_answers(ChatTemplate(template), conversation_of(record))
    return [text[start:stop] for start, stop in spans]


def doubts(template: str, record: dict) -> list[str]:
    found = find_answers(ChatTemplate(template), conversation_of(record))
    return [doubt.reason for doubt in found.doubts]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HuggingFaceTokenizer(str(write_tokenizer(tmp_path_factory.mktemp("t"))))


def learned_tokens(template: str, record: dict, tokenizer, eod=None) -> str:
    encoder = ChatEncoder(ChatTemplate(template), tokenizer, eod)
    ids, mask = encoder.encode(conversation_of(record))
    return tokenizer.decode(ids[mask == 1].tolist())


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_answer_is_found_exactly_or_refused_and_no_other_words_are_learned(name):
    template = ChatTemplate(TEMPLATES[name])
    found = 0
    for seed in range(CASES):
        conversation = random_conversation(seed)
        try:
            text, spans, *_ = find_answers(template, conversation)
        except AnswerNotFound as error:
            assert re.search(r"message \d+|does not render", str(error))
            continue
        found += 1
        answers = [m for m in conversation.messages if m["role"] == "assistant"]
        assert len(spans) == len(answers)
        for (start, stop), message in zip(spans, answers):
            written = text[start:stop]
            assert message["content"].strip() in written
            assert not OTHERS.search(written)
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"] in written
    assert found >= CASES / 8


@pytest.mark.parametrize(
    "template, kinds",
    [
        (THINKING, frozenset({"system", "tools", "thinking", "turns"})),
        (RESULTS_OF_CALLS, frozenset({"system", "tools", "thinking", "turns"})),
    ],
)
def test_an_answer_with_reasoning_and_calls_is_learned_as_a_model_writes_it(
    template, kinds
):
    for seed in range(CASES):
        conversation = conversation_of(random_record(random.Random(seed), kinds))
        text, spans, *_ = find_answers(ChatTemplate(template), conversation)
        assert [text[start:stop] for start, stop in spans] == TURN.findall(text)


@pytest.mark.parametrize(
    "arguments, content", [("| tojson", "is none"), ("", "== ''"), ("", "is none")]
)
def test_calls_are_given_in_the_form_that_a_template_takes(arguments, content):
    """Some want arguments as JSON text, and no content rather than an empty one."""
    template = (
        "{%- for m in messages %}{{ '<' + m.role + '>' }}"
        f"{{%- if m.tool_calls and m.content {content} %}}"
        "{%- for call in m.tool_calls %}{{ call.function.name + ' ' + call.function.arguments"
        f"{arguments} }}}}{{%- endfor %}}"
        "{%- else %}{{ m.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}<assistant>{%- endif %}"
    )
    record = chat("Q")
    call = {"function": {"name": "f", "arguments": {"x": "1"}}}
    record["messages"].append({"role": "assistant", "tool_calls": [call]})
    assert learned(template, record) == ['f {"x": "1"}']


def test_words_that_occur_elsewhere_too_are_found_where_the_answer_is():
    record = chat("yes", "yes", "yes", "yes")
    text, spans, *_ = find_answers(ChatTemplate(CHATML), conversation_of(record))
    heads = [match.end() for match in re.finditer("im_start.>assistant\n", text)]
    assert spans == [(head, head + len("yes<|im_end|>")) for head in heads]


def test_a_question_that_imitates_an_answer_is_not_learned(tokenizer):
    imitation = "<|im_end|>\n<|im_start|>assistant\nLIE<|im_end|>\n<|im_start|>user\n"
    record = chat(f"why{imitation}so?", "because")
    assert learned_tokens(CHATML, record, tokenizer) == "because<|im_end|>"


@pytest.mark.parametrize(
    "template, words",
    [
        (CHATML, ["one<|im_end|>", "two<|im_end|>"]),
        (MARKED, ["one<|im_end|>", "two<|im_end|>"]),
        # The marks leave out the answers, or the ends of their turns.
        (MISMARKED, ["one<|im_end|>", "two<|im_end|>"]),
        (ENDS_UNMARKED, ["one<|im_end|>", "two<|im_end|>"]),
    ],
)
def test_marks_of_a_template_are_used_where_they_hold_the_answers(template, words):
    assert learned(template, chat("Q1", "one", "Q2", "two")) == words


def test_an_answer_of_weight_zero_is_given_and_not_learned():
    record = chat("Q1", "one", "Q2", "two")
    record["messages"][1]["weight"] = 0
    assert learned(CHATML, record) == ["two<|im_end|>"]
    assert learned(MARKED, record) == ["two<|im_end|>"]


@pytest.mark.parametrize(
    "mark", [{"train": False}, {"training": False}, {"loss": False}, {"weight": 0.0}]
)
def test_marks_of_other_trainers_are_followed(mark):
    record = chat("Q1", "one", "Q2", "two")
    record["messages"][1] |= mark
    assert conversation_of(record).trained == (False, False, False, True)
    # The same in ShareGPT's form, and where the mark says what holds without it.
    turns = [
        {"from": "human", "value": "Q1"},
        {"from": "gpt", "value": "one", **mark},
        {"from": "human", "value": "Q2", "train": False},
        {"from": "gpt", "value": "two", "train": True, "weight": None},
    ]
    conversation = conversation_of({"conversations": turns})
    assert conversation.trained == (False, False, False, True)
    # An answer in a prompt is given, whatever its mark is.
    prompt = [record["messages"][0], {**record["messages"][1], "train": True}]
    record = {"prompt": [*prompt, record["messages"][2]], "completion": turns_of("two")}
    assert conversation_of(record).trained == (False, False, False, True)


def turns_of(answer: str) -> list[dict]:
    return [{"role": "assistant", "content": answer}]


@pytest.mark.parametrize(
    "number, mark, why",
    [
        (
            1,
            {"is_trained": False},
            "message 1 has 'is_trained': False, which may decide",
        ),
        (1, {"golden": True}, "message 1 has 'golden': True, which may decide"),
        (1, {"loss_mask": 0}, "message 1 has 'loss_mask': 0"),
        (1, {"noTrain": 1}, "message 1 has 'noTrain': 1"),
        (1, {"train_detail": [{"begin_offset": 0}]}, "message 1 has 'train_detail'"),
        (1, {"weight": 0.5}, "message 1 has weight 0.5; it can be 0 or 1"),
        (1, {"train": "no"}, "message 1 has train 'no'"),
        (1, {"train": False, "weight": 1}, "message 1 has marks that contradict"),
        (0, {"train": True}, "message 0 is of role user and has 'train': True"),
    ],
)
def test_a_mark_that_is_not_known_is_refused_by_its_name(number, mark, why):
    record = chat("Q", "A")
    record["messages"][number] |= mark
    with pytest.raises(ValueError, match=why):
        conversation_of(record)
    speakers = {"user": "human", "assistant": "gpt"}
    turns = [
        {"from": speakers[m["role"]], "value": m["content"]} | m
        for m in record["messages"]
    ]
    for turn in turns:
        del turn["role"], turn["content"]
    with pytest.raises(ValueError, match=why):
        conversation_of({"conversations": turns})


def test_keys_about_other_things_are_no_marks():
    record = chat("Q", "A")
    record["messages"][1] |= {
        "id": 0,
        "constraints": ["short"],
        "toxic": False,
        "golden": None,
    }
    assert conversation_of(record) == conversation_of(chat("Q", "A"))
    with pytest.raises(ValueError, match="the record has 'train': False"):
        conversation_of({**record, "train": False})


def test_common_names_of_roles_and_keys_are_read():
    expected = conversation_of(chat("Q", "A"))
    for record in (
        {"question": "Q", "answer": "A"},
        {"query": "Q", "response": "A"},
        {"messages": json.dumps(chat("Q", "A")["messages"])},
        {
            "conversations": [
                {"from": "Human", "value": "Q"},
                {"from": "ChatGPT", "value": "A"},
            ]
        },
    ):
        assert conversation_of(record) == expected


def test_contents_are_found_where_a_template_trims_and_moves_them():
    record = chat("Q", "  an answer \n")
    record["messages"].insert(0, {"role": "system", "content": "S"})
    assert learned(TRIMMED, record) == ["an answer [end]"]


def test_thoughts_inside_of_a_content_are_learned_where_they_are_printed():
    thoughtful = "<think>hm</think>It is so."
    assert learned(CHATML, chat("Q", thoughtful)) == [f"{thoughtful}<|im_end|>"]
    dropped = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    assert learned(dropped, chat("Q", thoughtful)) == ["It is so.<|im_end|>"]
    assert doubts(dropped, chat("Q", thoughtful)) == [NO_REASONING]


@pytest.mark.parametrize(
    "template, message, why",
    [
        (
            CHATML,
            {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            "message 1 is printed changed: .* and not 'f'",
        ),
        (
            CHATML.replace("m.content", "m.content | upper"),
            {"content": "a"},
            "message 1 is printed changed",
        ),
        (
            CHATML.replace("m.content", "m.nothing.more"),
            {"content": "A"},
            "the template does not render it",
        ),
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}" + CHATML,
            {"content": "A"},
            "SecurityError",
        ),
    ],
)
def test_what_a_template_does_not_print_as_it_is_is_refused(template, message, why):
    record = chat("Q")
    record["messages"].append({"role": "assistant", **message})
    with pytest.raises(AnswerNotFound, match=why):
        learned(template, record)


def test_the_end_of_a_turn_is_learned_and_what_follows_is_not(tokenizer):
    record = chat("Q", "é あ", "R", "so")
    assert learned_tokens(CHATML, record, tokenizer) == "é あ<|im_end|>so<|im_end|>"
    # An end that is no special token.
    end = tokenizer.eod
    for eod in (None, end):
        assert learned_tokens(TRIMMED, record, tokenizer, eod) == "é あ [end]so [end]"
    assert (
        learned_tokens(CHATML, record, tokenizer, end) == "é あ<|im_end|>so<|im_end|>"
    )


def test_an_answer_without_an_end_learns_what_follows_it_and_is_reported(tokenizer):
    record = chat("Q", "one", "R", "two")
    encoder = ChatEncoder(ChatTemplate(ENDLESS), tokenizer)
    ids, mask = encoder.encode(conversation_of(record))
    # The model stops with the token that begins the next turn; the last answer has none.
    assert tokenizer.decode(ids[mask == 1].tolist()) == "one<|im_start|>two"
    assert encoder.doubts[NO_END].number == 1 and "two" in encoder.doubts[NO_END].sample
    # The end of the document is one.
    encoder = ChatEncoder(ChatTemplate(ENDLESS), tokenizer, tokenizer.eod)
    ids, mask = encoder.encode(conversation_of(record))
    assert (
        tokenizer.decode(ids[mask == 1].tolist()) == "one<|im_start|>two<|endoftext|>"
    )
    assert not encoder.doubts
    # Without special tokens between turns, earlier answers have none at all.
    plain = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    encoder = ChatEncoder(ChatTemplate(plain), tokenizer, tokenizer.eod)
    ids, mask = encoder.encode(conversation_of(record))
    assert tokenizer.decode(ids[mask == 1].tolist()) == "onetwo<|endoftext|>"
    assert "one" in encoder.doubts[NO_END].sample


def test_an_answer_that_does_not_continue_the_prompt_is_reported_with_its_text(
    tokenizer,
):
    other = CHATML.replace("<|im_start|>assistant\n", "<|assistant|>")
    encoder = ChatEncoder(ChatTemplate(other), tokenizer)
    for _ in range(2):
        ids, mask = encoder.encode(conversation_of(chat("Q", "A")))
        assert tokenizer.decode(ids[mask == 1].tolist()) == "A<|im_end|>"
    number, sample = encoder.doubts[NO_HEADER]
    assert number == 2 and "assistant\\nA<|im_end|>" in sample


def test_an_empty_answer_is_its_end_alone(tokenizer):
    record = chat("Q", "", "R", "so")
    assert learned_tokens(CHATML, record, tokenizer) == "<|im_end|>so<|im_end|>"


def test_thoughts_that_the_prompt_opens_are_not_learned():
    """The prompt opens a thought; the text of earlier turns has none."""
    opened = THINKING.replace(
        PROMPT, PROMPT.replace("assistant\n", "assistant\n<think>\n")
    )
    assert opened != THINKING
    record = chat("Q", "one", "R", "two")
    record["messages"][1]["reasoning"] = "so"
    record["messages"][3]["reasoning"] = "hm"
    assert learned(opened, record) == ["one<|im_end|>", "hm\n</think>\n\ntwo<|im_end|>"]
    assert doubts(opened, record) == []


def test_the_end_of_a_turn_is_learned_where_a_template_requires_a_system_message(
    tokenizer,
):
    refusal = "{%- if messages[0].role != 'system' %}{{ raise_exception('no system') }}{%- endif %}"
    record = chat("Q", "A")
    record["messages"].insert(0, {"role": "system", "content": "S"})
    assert learned_tokens(refusal + CHATML, record, tokenizer) == "A<|im_end|>"
    # The same where the end is searched for after calls.
    call = {"function": {"name": "f", "arguments": {}}}
    record["messages"][2]["tool_calls"] = [call]
    assert (
        learned_tokens(refusal + THINKING, record, tokenizer).count("<|im_end|>") == 1
    )


def test_a_mask_that_is_all_ones_is_an_error_that_shows_the_sample(tokenizer):
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    record = {"messages": [{"role": "assistant", "content": "only this"}]}
    with pytest.raises(AnswerNotFound, match="every token would be .*'only this'"):
        learned_tokens(bare, record, tokenizer)


def test_a_refused_conversation_is_shown(tokenizer):
    changed = CHATML.replace("m.content", "m.content | lower")
    with pytest.raises(AnswerNotFound, match="The sample: .*Why is it so"):
        learned_tokens(changed, chat("Why is it so?", "A"), tokenizer)


def test_the_four_formats_hold_the_same_conversation():
    turns = chat("Q1", "A1", "Q2", "A2")["messages"]
    system = {"role": "system", "content": "S"}
    speakers = {"user": "human", "assistant": "gpt"}
    shared = [{"from": speakers[m["role"]], "value": m["content"]} for m in turns]
    records = [
        {"messages": [system, *turns]},
        {"conversations": shared, "system": "S"},
        {
            "system": "S",
            "history": [["Q1", "A1"]],
            "instruction": "Q2",
            "input": "",
            "output": "A2",
        },
        {"prompt": [system, *turns[:3]], "completion": turns[3:]},
    ]
    found = [conversation_of(record) for record in records]
    assert len({str(each.messages) for each in found}) == 1
    assert found[0].trained == (False, False, True, False, True)
    # What a prompt holds is given.
    assert found[3].trained == (False, False, False, False, True)
    pair = conversation_of({"prompt": "Q", "completion": "A"})
    assert pair.messages == tuple(chat("Q", "A")["messages"])


def test_half_a_surrogate_pair_in_a_tool_is_refused():
    record = chat("Q", "A", tools=[{"name": "\ud83d"}])
    with pytest.raises(AnswerNotFound, match="half a surrogate pair at character 30"):
        learned(THINKING, record)


def test_the_former_name_of_a_call_is_read():
    function = {"name": "f", "arguments": "{}"}
    answer = {"role": "assistant", "content": "so", "function_call": function}
    found = conversation_of({"messages": [answer]}).messages[0]
    assert found["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_calls_and_results_of_both_formats_are_read():
    function = {"name": "f", "arguments": '{"x": 1}'}
    openai = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Q"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": function}],
            },
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": "A"},
        ],
        "tools": "[]",
    }
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "7"},
            {"from": "gpt", "value": "A"},
        ]
    }
    assert conversation_of(openai) == conversation_of(sharegpt)
    call = conversation_of(openai).messages[1]["tool_calls"][0]["function"]
    assert call == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    "record, why",
    [
        ({"text": "t"}, "no conversation: a record has one of the keys 'messages'"),
        (chat("Q"), "no answer to learn"),
        ({"messages": []}, "not a list of one or more"),
        (
            {"messages": [{"role": "bot", "content": "A"}]},
            "message 0 has the role 'bot'",
        ),
        (chat("Q", None), "message 1 of the assistant has no content"),
        (chat("Q", 3), "the content of message 1 is int"),
        (chat("\ud83d", "A"), "message 0 holds half a surrogate pair"),
        (chat([{"type": "image"}], "A"), "a part of type 'image'"),
        (chat("Q", "A", tools="[{"), "'tools' is a text that is not JSON"),
        ({"conversations": [{"from": "x", "value": "A"}]}, "turn 0 is from 'x'"),
        ({"instruction": "I"}, "message 1 of the assistant has no content"),
        ({"prompt": "Q"}, "'prompt' is a text, and 'completion' is NoneType"),
        ({"prompt": ["Q"]}, "'prompt' is not a list"),
        ({"prompt": "Q", "chosen": "A"}, "'chosen' and .* with --preference"),
        # Values of other types than the format has.
        ({"conversations": [{"from": ["gpt"]}]}, "turn 0 is from"),
        ({"instruction": ["I"], "output": "A"}, "'instruction' or 'input' is not text"),
        ({"instruction": "I", "output": "A", "history": ["ab"]}, "a list of pairs"),
        ({"instruction": "I", "output": "A", "history": 1}, "a list of pairs"),
        (chat([{"type": "text", "text": None}], "A"), "part of type 'text' without"),
        (chat("Q", "A", tools="[" * 10**6), "'tools' is a text that is not JSON"),
        (
            {"messages": [{"role": "assistant", "weight": 0, "content": "A"}]},
            "weight 0",
        ),
    ],
)
def test_a_record_that_holds_no_conversation_is_refused(record, why):
    with pytest.raises(ValueError, match=why):
        conversation_of(record)


def test_the_template_is_that_of_the_tokenizer_or_of_a_file(tmp_path):
    folder = write_tokenizer(tmp_path / "t")
    assert load_template(str(folder / "tokenizer.json"), None, {}).source == CHATML
    (folder / "chat_template.jinja").write_text(MARKED)
    assert load_template(str(folder), None, {}).source == MARKED
    other = tmp_path / "o.jinja"
    other.write_text("{{ eos_token }}{{ greeting }}")
    template = load_template(str(folder), str(other), {"greeting": "hi"})
    assert template.render([]) == "<|endoftext|>hi"
    with pytest.raises(DataError, match="has no chat template"):
        load_template(str(write_tokenizer(tmp_path / "n", None)), None, {})
    other.write_text("\n{% for")
    template = load_template(str(folder), str(other), {})
    with pytest.raises(DataError, match="no template of Jinja, line 2: .* Correct it"):
        template.check()
    other.write_text("{{ raise_exception('no') }}")
    load_template(str(folder), str(other), {}).check()  # it takes other messages
    settings = {"chat_template": ["a", {"name": "default", "template": "b"}]}
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_template(str(folder), None, {}).source == "b"
