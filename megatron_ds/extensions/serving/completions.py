"""/v1/completions of OpenAI's API: texts and lists of token ids are continued."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from .accepted_fields import OF_TEXTS
from .openai_reply import OpenAIReply, ReplyPart
from .refused_request import RefusedRequest
from .request_fields import Values, integer
from .sampling_fields import (
    MOST_TOKENS,
    Count,
    Integers,
    SamplingFields,
    Texts,
)
from .served_model import ServedModel
from .served_text import Delta, ServedText
from .served_tokens import completion_log_probs

MOST_ALTERNATIVES = 20
MOST_TEXTS = 4096
USUAL_TOKENS = 16  # without max_tokens, as in OpenAI's API
TokenLists = Annotated[list[Integers], Field(fail_fast=True)]


class CompletionFields(SamplingFields):
    """What /v1/completions reads."""

    harmless = OF_TEXTS
    prompt: str | Texts | Integers | TokenLists = Field(
        description="a string, a list of strings, a list of token ids, or a list of such lists"
    )
    max_tokens: Count = integer(None, 0, MOST_TOKENS)
    echo: bool = False
    logprobs: int | None = integer(None, 0, MOST_ALTERNATIVES)


class CompletionReply(OpenAIReply):
    """The answer to a request for completions."""

    prefix = "cmpl-"
    kinds = ("text_completion", "text_completion")
    asked: CompletionFields

    @property
    def shows_log_probs(self) -> bool:
        return self.asked.logprobs is not None

    def choice(self, index: int, delta: Delta, is_chunk: bool) -> dict[str, Any]:
        """Return a choice with what is new of its text."""
        log_probs = None
        if self.shows_log_probs:
            log_probs = completion_log_probs(delta.entries, delta.offset)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": log_probs,
            "finish_reason": delta.finish,
        }


def completions(body: Values, model: ServedModel) -> CompletionReply:
    """Read a request. Raises RefusedRequest."""
    _check_size(body.get("prompt"), model)
    asked = CompletionFields.read(body)
    model.require_name(asked.model)
    if asked.max_tokens == 0 and not asked.echo:
        raise RefusedRequest(
            "max_tokens is 0 without echo, so there is nothing to answer. Use 1 or more.",
            "max_tokens",
        )
    prompts = _prompts(asked.prompt)
    count = len(prompts) * asked.n
    if count > MOST_TEXTS:
        raise RefusedRequest(
            f"{len(prompts)} prompts and n={asked.n} are {count:,} texts; a request has at most {MOST_TEXTS:,}. Ask "
            "for fewer.",
            "prompt",
        )
    model.check_texts(count, "prompt")
    parts: list[ReplyPart] = []
    seed = asked.first_seed()
    for number, prompt in enumerate(prompts):
        parts += _parts_of(prompt, asked, model, seed + number * asked.n)
    return CompletionReply(parts, asked, model)


def _check_size(value: Any, model: ServedModel) -> None:
    """Raises RefusedRequest for lists that are too long to be used, before their elements are looked at."""
    if not isinstance(value, list):
        return
    is_one = bool(value) and type(value[0]) is int
    most = model.max_length if is_one else MOST_TEXTS
    if len(value) > most:
        what = "tokens" if is_one else "prompts"
        raise RefusedRequest(
            f"prompt has {len(value):,} {what}; at most {most:,} can be used.", "prompt"
        )


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a request. Raises RefusedRequest for none."""
    if isinstance(value, str) or value and isinstance(value[0], int):
        return [value]
    if not value or [] in value:
        raise RefusedRequest("prompt has an empty list; give text or tokens.", "prompt")
    return value


def _parts_of(
    prompt: str | list[int], asked: CompletionFields, model: ServedModel, seed: int
) -> Iterator[ReplyPart]:
    """Yield the n texts of a prompt, each with a seed of its own, from `seed` on."""
    tokens = model.encode(prompt, "prompt")
    most = asked.max_tokens
    if most is None:
        most = max(min(USUAL_TOKENS, model.room(tokens)), 1)
    model.check_ids(asked.stop_token_ids, "stop_token_ids")
    for number in range(asked.n):
        # A prompt that is only scored needs one token, which is dropped.
        request = model.request(
            "prompt",
            tokens=tokens,
            sampling=asked.sampling(seed + number),
            max_new_tokens=max(most, 1),
            min_new_tokens=asked.least(max(most, 1)),
            stop_tokens=asked.stop_tokens(model.end_tokens),
            alternatives=asked.logprobs,
            scores_prompt=asked.echo and asked.logprobs is not None,
        )
        text = ServedText(model.tokenizer, tokens, asked.stops(), most)
        if asked.echo:
            text.echo(prompt if isinstance(prompt, str) else None)
        yield ReplyPart(request, text)
