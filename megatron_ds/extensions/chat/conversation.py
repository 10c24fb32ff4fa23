"""`Conversation`: the messages of a chat as chat templates take them, from the common formats of JSON lines.

    {"messages": [{"role": "user", "content": "…"}, …], "tools": […]}              OpenAI
    {"conversations": [{"from": "human", "value": "…"}, …], "system": "…"}         ShareGPT
    {"instruction": "…", "input": "…", "output": "…", "history": [["…", "…"]]}     Alpaca
    {"prompt": "…", "completion": "…"}         texts, which become a turn each, or lists of messages
    {"question": "…", "answer": "…"}           also "query" and "response"

An assistant's message may have "reasoning_content" (also named "reasoning" or "thinking"), "tool_calls", and a mark
(`MARKS`) that it is not an answer to learn. A mark that is not known is an error: dropped, it would be learned.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")
# Roles of ShareGPT's files → roles here.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
# Keys of a message that decide whether it is learned, in files of OpenAI, axolotl, ms-swift and others.
MARKS = ("weight", "train", "training", "trainable", "loss")
PARTS_OF_MESSAGE = (
    "role",
    "content",
    *REASONING,
    "tool_calls",
    "tool_call_id",
    "function_call",
    "name",
)
# Booleans of messages in public files that do not decide whether they are learned.
ABOUT_OTHERS = ("toxic", "redacted", "deleted", "synthetic", "review_result")
# Words in the name of a key that seems to be about what is learned.
SEEMS_MARK = re.compile("(^|_)(train|loss|mask|weight|learn|supervis|ignore)")


@dataclass(frozen=True)
class Conversation:
    """A chat of at least one answer.

    messages  dictionaries with "role", and "content" where there is one, a text. An assistant's may have
              "reasoning_content", a text, and "tool_calls", whose arguments are dictionaries
    tools     JSON schemas of the functions that the assistant may call; None without any
    trained   for each message whether it is an answer to learn
    """

    messages: tuple[Message, ...]
    tools: tuple[dict, ...] | None
    trained: tuple[bool, ...]

    def forms(self) -> Iterator["Conversation"]:
        """Yield the same conversation as templates take it: as it is, then forms that some expect.

        Some print calls only of a message whose content is None, some take arguments as a JSON text, and those of
        models that see images take a content as a list of parts.
        """
        yield self
        if any(message.get("tool_calls") for message in self.messages):
            bare = tuple(map(_without_content, self.messages))
            yield replace(self, messages=bare)
            yield replace(self, messages=tuple(map(_with_text, self.messages)))
            yield replace(self, messages=tuple(map(_with_text, bare)))
        yield replace(self, messages=tuple(map(_with_parts, self.messages)))


def text_of(message: Message) -> str:
    """Return the content of a message of any form as a text."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def with_content(message: Message, text: str) -> Message:
    """Return a message of the same role and form with another content; of the assistant, with nothing else."""
    kept = {} if message["role"] == "assistant" else message
    content = [_part(text)] if isinstance(message["content"], list) else text
    return {**kept, "role": message["role"], "content": content}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _with_parts(message: Message) -> Message:
    """Return a message with its content as a list of parts."""
    return {**message, "content": [_part(message["content"])]}


def _without_content(message: Message) -> Message:
    """Return a message of calls alone with the content None."""
    if message["content"] or not message.get("tool_calls"):
        return message
    return {**message, "content": None}


def _with_text(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def conversation_of(record: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a record in any of the formats. Raises ValueError with what is wrong."""
    key = next((key for key in FORMATS if record.get(key) is not None), None)
    if key is None:
        found = ", ".join(map(repr, record)) or "none"
        known = ", ".join(map(repr, FORMATS))
        raise ValueError(
            f"no conversation: a record has one of the keys {known}, "
            f"and this one has {found}"
        )
    _check_record(record)
    raw = FORMATS[key](record)
    messages = [_message(value, number) for number, value in enumerate(raw)]
    trained = tuple(
        _is_answer(message["role"], value, number)
        for number, (message, value) in enumerate(zip(messages, raw))
    )
    if not any(trained):
        raise ValueError(
            "no answer to learn: it has no message of the assistant that is not marked as given, such as with weight 0"
        )
    return Conversation(tuple(messages), _tools(record.get("tools")), trained)


def messages_of(value: object) -> list[Message]:
    """Return the messages of a chat that waits for an answer. Raises ValueError with what is wrong."""
    messages = enumerate(_list(value, "messages"))
    return [_message(raw, number) for number, raw in messages]


def _openai(record: Mapping[str, Any]) -> list[Message]:
    return _list(record["messages"], "messages")


def _sharegpt(record: Mapping[str, Any]) -> list[Message]:
    messages = _system_of(record)
    for number, turn in enumerate(_list(record["conversations"], "conversations")):
        # Some files name roles and contents as OpenAI does.
        if "from" not in turn:
            messages.append(turn)
            continue
        speaker = str(turn["from"]).lower()
        if speaker not in SPEAKERS:
            raise ValueError(
                f"turn {number} is from {turn['from']!r}; known are {', '.join(SPEAKERS)}"
            )
        key = "content"
        value = turn.get("value")
        if speaker == "function_call":
            key = "tool_calls"
            value = _calls_in_text(value, number)
        others = {name: turn[name] for name in turn if name not in ("from", "value")}
        messages.append({**others, "role": SPEAKERS[speaker], key: value})
    return messages


def _alpaca(record: Mapping[str, Any]) -> list[Message]:
    messages = _system_of(record)
    # Earlier rounds, as pairs of a question and an answer.
    for question, answer in _pairs(record.get("history")):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    # An input is a second part of the question.
    parts = [record["instruction"], record.get("input")]
    try:
        question = "\n".join(filter(None, parts))
    except TypeError:
        raise ValueError("'instruction' or 'input' is not text") from None
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": record.get("output")})
    return messages


def _pairs(value: object) -> list[list]:
    """Return the rounds of a history. Raises ValueError."""
    if not value:
        return []
    if isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in value
    ):
        return value
    raise ValueError("'history' is not a list of pairs of a question and an answer")


def _prompt_completion(record: Mapping[str, Any]) -> list[Message]:
    prompt = record["prompt"]
    completion = record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        question = {"role": "user", "content": prompt}
        return [question, {"role": "assistant", "content": completion}]
    if isinstance(prompt, str):
        pair = (
            "; 'chosen' and 'rejected' are read with --preference"
            if "chosen" in record
            else ""
        )
        raise ValueError(
            f"'prompt' is a text, and 'completion' is {type(completion).__name__}, not a text{pair}"
        )
    given = [_as_given(message) for message in _list(prompt, "prompt")]
    return [*given, *_list(completion, "completion")]


def _as_given(message: Message) -> Message:
    """Return a message of a prompt, which is not learned whatever its marks are."""
    kept = {name: message[name] for name in message if name not in MARKS}
    return {**kept, "weight": 0}


def _question_answer(
    names: tuple[str, str], record: Mapping[str, Any]
) -> list[Message]:
    """Return the turns of a record that has a question and an answer under these names."""
    question, answer = (record.get(name) for name in names)
    return [
        *_system_of(record),
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


# The first key that a record has names its format.
FORMATS: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "messages": _openai,
    "conversations": _sharegpt,
    "instruction": _alpaca,
    "prompt": _prompt_completion,
    "question": partial(_question_answer, ("question", "answer")),
    "query": partial(_question_answer, ("query", "response")),
}


def _system_of(record: Mapping[str, Any]) -> list[Message]:
    """Return the system message of a record that has it beside the turns."""
    text = record.get("system")
    if not text:
        return []
    return [{"role": "system", "content": text}]


def _list(value: object, what: str) -> list[Message]:
    """Return the messages in a list, or in the JSON text of one. Raises ValueError."""
    if isinstance(value, str):
        try:
            value = _value_in(value)
        except ValueError:
            raise ValueError(f"{what!r} is a text that is no JSON") from None
    if isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
        return value
    raise ValueError(f"{what!r} is not a list of one or more messages")


def _check_record(record: Mapping[str, Any]) -> None:
    """Raise ValueError for a mark of the whole record: it would have no effect."""
    for name in MARKS:
        if record.get(name) not in (None, 1):
            raise ValueError(
                f"the record has {name!r}: {record[name]!r}, and only messages are marked. Mark its "
                "answers, or remove it"
            )


def _is_answer(role: str, raw: Message, number: int) -> bool:
    """Return whether a message is an answer to learn. Raises ValueError for marks that are not known, or
    contradict.
    """
    _check_marks(raw, number)
    given = {name: raw[name] for name in MARKS if raw.get(name) is not None}
    for name, value in given.items():
        if value not in (0, 1):
            raise ValueError(
                f"message {number} has {name} {value!r}; it can be 0 or 1, false or true"
            )
        is_weight = name == "weight"
        if value and role != "assistant" and not is_weight:
            raise ValueError(
                f"message {number} is of role {role} and has {name!r}: {value!r}, and only answers of the assistant "
                "are learned. Remove the mark"
            )
    if len(set(map(bool, given.values()))) > 1:
        raise ValueError(f"message {number} has marks that contradict: {given}")
    return role == "assistant" and all(given.values())


def _check_marks(raw: Message, number: int) -> None:
    """Raises ValueError for a key that may decide whether a message is learned, and is not known."""
    for name, value in raw.items():
        if name in (*MARKS, *PARTS_OF_MESSAGE, *ABOUT_OTHERS) or value is None:
            continue
        words = re.sub("(?<=[a-z])(?=[A-Z])|-", "_", name).lower()
        if isinstance(value, bool) or SEEMS_MARK.search(words):
            raise ValueError(
                f"message {number} has {name!r}: {value!r}, which may decide whether it is learned and is not known. "
                f"Known marks are {', '.join(MARKS)}; remove it, or use one of them"
            )


def _message(raw: Message, number: int) -> Message:
    """Return a message as templates take it, without keys of other uses."""
    role = raw.get("role")
    if role == "function":  # its former name
        role = "tool"
    if role not in ROLES:
        raise ValueError(
            f"message {number} has the role {role!r}; known are {', '.join(ROLES)}"
        )
    message: Message = {"role": role}
    content = _text(raw.get("content"), number)
    # Keys that belong to a role.
    if role == "assistant":
        reasoning = next((raw[key] for key in REASONING if raw.get(key)), None)
        calls = _calls(raw.get("tool_calls"), number)
        # OpenAI's former name of a single call.
        if former := raw.get("function_call"):
            calls.append(_call(former, number))
        if reasoning is not None:
            message["reasoning_content"] = _text(reasoning, number)
        if calls:
            message["tool_calls"] = calls
        if content is None and not (reasoning or calls):
            raise ValueError(f"message {number} of the assistant has no content")
    elif content is None:
        raise ValueError(f"message {number} of role {role} has no content")
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if raw.get(key) is not None:
                message[key] = raw[key]
    message["content"] = content or ""
    return message


def _text(value: object, number: int) -> str | None:
    """Return a content as one text: itself, or its parts of type "text" one after the other."""
    if value is None or isinstance(value, str):
        text = value
    elif isinstance(value, list) and all(isinstance(part, dict) for part in value):
        kinds = [part.get("type") for part in value]
        other = [kind for kind in kinds if kind != "text"]
        if other:
            raise ValueError(
                f"message {number} has a part of type {other[0]!r}, and only texts are read"
            )
        texts = [part.get("text") for part in value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"message {number} has a part of type 'text' without text")
        text = "".join(texts)
    else:
        raise ValueError(
            f"the content of message {number} is {type(value).__name__}, not text"
        )
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as e:  # legal in JSON, and no character
        raise ValueError(
            f"message {number} holds half a surrogate pair at character {e.start}"
        ) from None
    return text


def _calls(value: object, number: int) -> list[dict]:
    """Calls in OpenAI's form, with arguments as dictionaries, which templates take."""
    if not value:
        return []
    if not isinstance(value, list):
        raise ValueError(f"tool_calls of message {number} is not a list")
    return [_call(call, number) for call in value]


def _call(call: object, number: int) -> dict:
    fields = call if isinstance(call, dict) else {}
    function = fields.get("function", fields)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call of message {number} names no function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = _value_in(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(
            f"the arguments of {function['name']!r} in message {number} are no JSON object"
        )
    written: dict[str, Any] = {"type": "function"}
    if fields.get("id"):
        written["id"] = fields["id"]
    written["function"] = {"name": function["name"], "arguments": arguments}
    return written


def _calls_in_text(value: object, number: int) -> list[dict]:
    """Return the calls that a turn of ShareGPT's function_call holds as JSON text."""
    try:
        calls = _value_in(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"turn {number} is a function_call, and its value is not JSON"
        ) from None
    if isinstance(calls, list):
        return calls
    return [calls]


def _tools(value: object) -> tuple[dict, ...] | None:
    if isinstance(value, str) and value:
        try:
            value = _value_in(value)
        except ValueError:
            raise ValueError("'tools' is a text that is not JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError("'tools' is not a list of JSON schemas")
    return tuple(value)


def _value_in(text: Any) -> Any:
    """Return the value of a JSON text. Raises ValueError, and TypeError for another value than a text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
