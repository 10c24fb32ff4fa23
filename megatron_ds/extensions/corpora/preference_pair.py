"""Two answers to the same question, of which one is preferred.

{"prompt": "…", "chosen": "…", "rejected": "…"}            texts, which become a turn each
{"prompt": […], "chosen": […], "rejected": […]}            lists of messages
{"chosen": […], "rejected": […]}                           whole conversations: what both begin with is the prompt
{"prompt": "…", "chosen": […], "rejected": […]}            the same, with a question of theirs again, as UltraFeedback
"""

from collections.abc import Mapping
from typing import Any

from ..chat.conversation import Conversation, conversation_of

ANSWERS = ("chosen", "rejected")


def pair_of(record: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """Return the conversation with the chosen answer and that with the rejected one. Raises ValueError."""
    for name in ANSWERS:
        if name not in record:
            found = ", ".join(map(repr, record)) or "none"
            raise ValueError(f"no pair: it has no {name!r}; its keys are {found}")
    chosen, rejected = (record[name] for name in ANSWERS)
    if chosen == rejected:
        raise ValueError(
            "'chosen' and 'rejected' are equal, so that neither is preferred"
        )
    others = {name: record[name] for name in ("tools",) if name in record}
    prompt, *answers = _prompt_and_answers(record.get("prompt"), chosen, rejected)
    # One conversation may be the beginning of the other.
    for name, answer in zip(ANSWERS, answers):
        if answer == []:
            raise ValueError(f"{name!r} has no message after the prompt")
    of = lambda answer: conversation_of(
        {"prompt": prompt, "completion": answer, **others}
    )
    return of(answers[0]), of(answers[1])


def _prompt_and_answers(
    prompt: object, chosen: object, rejected: object
) -> tuple[object, object, object]:
    """(prompt, chosen answer, rejected answer) of any of the forms. Raises ValueError."""
    if prompt is None:
        return _divided(chosen, rejected)
    if isinstance(prompt, str) and isinstance(chosen, list):
        parts = _divided(chosen, rejected)
        _check_has(parts[0], prompt)
        return parts
    _check_kinds(prompt, chosen, rejected)
    return prompt, chosen, rejected


def _check_has(messages: list, question: str) -> None:
    """Raise ValueError unless the question is one of the messages with which both conversations begin."""
    contents = [m.get("content") for m in messages if isinstance(m, dict)]
    if question.strip() not in [str(content).strip() for content in contents]:
        raise ValueError(
            "'prompt' is a text that is not among the messages with which both answers begin. Leave it out, or give "
            "the answers alone, as texts"
        )


def _check_kinds(*parts: object) -> None:
    """Raise ValueError if prompt and answers are not of one kind."""
    for kind in (str, list):
        if all(isinstance(part, kind) for part in parts):
            return
    kinds = ", ".join(type(part).__name__ for part in parts)
    raise ValueError(
        f"'prompt', 'chosen' and 'rejected' are {kinds}, and not three texts or three lists of messages. Where both "
        "answers are whole conversations, leave out 'prompt'"
    )


def _divided(chosen: object, rejected: object) -> tuple[list, list, list]:
    """(messages that both conversations begin with, the rest of each). Raises ValueError."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise ValueError(
            "without 'prompt', 'chosen' and 'rejected' are conversations: lists of messages"
        )
    common = 0
    for one, other in zip(chosen, rejected):
        if one != other:
            break
        common += 1
    if not common:
        raise ValueError(
            "'chosen' and 'rejected' begin with different messages, so that they are no answers to the same prompt"
        )
    return chosen[:common], chosen[common:], rejected[common:]
