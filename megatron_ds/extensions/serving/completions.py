"""/v1/completions of OpenAI's API: texts and lists of token ids are continued."""

from collections.abc import Iterator
from typing import Any

from .accepted_fields import OF_TEXTS
from .openai_reply import OpenAIReply, ReplyPart
from .refused_request import RefusedRequest
from .request_fields import RequestField, Values, is_integers, read_fields
from .sampling_fields import (
    MOST_TOKENS,
    SAMPLING,
    least_of,
    sampling_of,
    seed_of,
    stop_tokens_of,
    stops_of,
)
from .served_model import ServedModel
from .served_text import Delta, ServedText
from .served_tokens import completion_log_probs

MOST_ALTERNATIVES = 20
MOST_TEXTS = 4096
USUAL_TOKENS = 16  # without max_tokens, as in OpenAI's API
FIELDS: dict[str, RequestField] = {
    "model": RequestField("text"),
    "prompt": RequestField("prompts"),
    "max_tokens": RequestField("integer", None, 0, MOST_TOKENS, nothing=(-1,)),
    "echo": RequestField("boolean", False),
    "logprobs": RequestField("integer", None, 0, MOST_ALTERNATIVES),
    "best_of": RequestField(
        "integer", 1, only=(1,), reason="Use n, and choose among the texts."
    ),
    "suffix": RequestField(
        "text", "", only=("",), reason="Texts are continued at their end."
    ),
    **SAMPLING,
    **OF_TEXTS,
}


class CompletionReply(OpenAIReply):
    """The answer to a request for completions."""

    prefix = "cmpl-"
    kinds = ("text_completion", "text_completion")

    @property
    def shows_log_probs(self) -> bool:
        return self.values["logprobs"] is not None

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
    values = read_fields(body, FIELDS, "prompt")
    model.require_name(values["model"])
    if values["max_tokens"] == 0 and not values["echo"]:
        raise RefusedRequest(
            "max_tokens is 0 without echo, so there is nothing to answer. Use 1 or more.",
            "max_tokens",
        )
    prompts = _prompts(values["prompt"])
    if len(prompts) * values["n"] > MOST_TEXTS:
        raise RefusedRequest(
            f"{len(prompts)} prompts and n={values['n']} are {len(prompts) * values['n']:,} texts; a request has at "
            f"most {MOST_TEXTS:,}. Ask for fewer.",
            "prompt",
        )
    model.check_texts(len(prompts) * values["n"], "prompt")
    parts: list[ReplyPart] = []
    seed = seed_of(values)
    for number, prompt in enumerate(prompts):
        parts += _parts_of(prompt, values, model, seed + number * values["n"])
    return CompletionReply(parts, values, model)


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
    if isinstance(value, str) or value and is_integers(value):
        return [value]
    if not value or [] in value:
        raise RefusedRequest("prompt has an empty list; give text or tokens.", "prompt")
    return value


def _parts_of(
    prompt: str | list[int], values: Values, model: ServedModel, seed: int
) -> Iterator[ReplyPart]:
    """Yield the n texts of a prompt, each with a seed of its own, from `seed` on."""
    tokens = model.encode(prompt, "prompt")
    most = values["max_tokens"]
    if most is None:
        most = max(min(USUAL_TOKENS, model.room(tokens)), 1)
    model.check_ids(values["stop_token_ids"], "stop_token_ids")
    for number in range(values["n"]):
        # A prompt that is only scored needs one token, which is dropped.
        request = model.request(
            "prompt",
            tokens=tokens,
            sampling=sampling_of(values, seed + number),
            max_new_tokens=max(most, 1),
            min_new_tokens=least_of(values, max(most, 1)),
            stop_tokens=stop_tokens_of(values, model.end_tokens),
            alternatives=values["logprobs"],
            scores_prompt=values["echo"] and values["logprobs"] is not None,
        )
        text = ServedText(model.tokenizer, tokens, stops_of(values), most)
        if values["echo"]:
            text.echo(prompt if isinstance(prompt, str) else None)
        yield ReplyPart(request, text)
