"""PUT /api of Megatron's text generation server: {"prompts": […], "tokens_to_generate": 64} → {"text": […]}."""

import secrets
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from ..generation.model_text import beginning_of
from ..generation.requests import GeneratedToken, Sampling
from .accepted_fields import OF_MEGATRON
from .openai_reply import ReplyPart
from .refused_request import RefusedRequest
from .request_fields import RequestFields, Values, integer, number
from .sampling_fields import MOST_TOKENS, SEEDS, Texts
from .served_model import ServedModel
from .served_text import ServedText

MOST_PROMPTS = 128


class MegatronFields(RequestFields):
    """What PUT /api reads."""

    harmless = OF_MEGATRON
    prompts: Texts = Field(
        min_length=1,
        max_length=MOST_PROMPTS,
        description=f"a list of strings, 1 to {MOST_PROMPTS}",
    )
    tokens_to_generate: int = integer(64, 0, MOST_TOKENS)
    logprobs: bool = False
    temperature: float = number(1.0, 0, 100)
    top_k: int = integer(0, 0, 1000)
    top_p: float = number(0.0, 0, 1)
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    random_seed: int = integer(-1, -1, SEEDS - 1)
    stop_token: int | None = integer(None, 0, MOST_TOKENS)

    def stops(self) -> list[str]:
        """Return the texts that end a continuation."""
        named = {"\n\n": self.stop_on_double_eol, "\n": self.stop_on_eol}
        return [text for text, is_asked in named.items() if is_asked]


class MegatronReply:
    """The answer to PUT /api, whole."""

    streams = False

    def __init__(self, parts: Sequence[ReplyPart], has_log_probs: bool):
        self.parts = tuple(parts)
        self._has_log_probs = has_log_probs

    def whole(self) -> dict[str, Any]:
        """text: prompts with what follows; segments: their tokens; logprobs: of all tokens but the first."""
        deltas = [part.text.take() for part in self.parts]
        log_probs = [[entry.log_prob for entry in d.entries[1:]] for d in deltas]
        return {
            "text": [delta.text for delta in deltas],
            "segments": [[entry.text for entry in d.entries] for d in deltas],
            "logprobs": log_probs if self._has_log_probs else None,
        }


def megatron_text(body: Values, model: ServedModel) -> MegatronReply:
    """Read a request. Raises RefusedRequest."""
    asked = MegatronFields.read(body)
    _check(asked)
    seed = asked.random_seed
    if seed < 0:
        seed = secrets.randbelow(SEEDS)
    parts = []
    for index, prompt in enumerate(asked.prompts):
        sampling = Sampling(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p or 1.0,
            seed=(seed + index) % SEEDS,  # prompts are independent samples
        )
        parts.append(_part(prompt, asked, model, sampling))
    return MegatronReply(parts, asked.logprobs)


def _check(asked: MegatronFields) -> None:
    """Raises RefusedRequest for fields that contradict each other."""
    if not asked.tokens_to_generate and not asked.logprobs:
        raise RefusedRequest(
            "tokens_to_generate 0 needs logprobs: true, since nothing else is answered.",
            "tokens_to_generate",
        )
    if not asked.temperature:
        raise RefusedRequest(
            "temperature is 0; the range is above 0, to 100. For greedy texts set top_k to 1.",
            "temperature",
        )
    if asked.top_k and asked.top_p:
        raise RefusedRequest("top_k and top_p are both given. Choose one.", "top_p")
    if "" in asked.prompts and not asked.add_BOS:
        raise RefusedRequest(
            "an empty prompt needs add_BOS: true, which puts a token in front.",
            "prompts",
        )


def _part(
    prompt: str, asked: MegatronFields, model: ServedModel, sampling: Sampling
) -> ReplyPart:
    tokens = _tokens(prompt, asked, model)
    most = asked.tokens_to_generate
    end = asked.stop_token
    model.check_ids([] if end is None else [end], "stop_token")
    request = model.request(
        "prompts",
        tokens=tokens,
        sampling=sampling,
        max_new_tokens=max(most, 1),
        stop_tokens=model.end_tokens if end is None else frozenset((end,)),
        alternatives=0 if asked.logprobs else None,
        scores_prompt=asked.logprobs,
    )
    text = ServedText(model.tokenizer, tokens, asked.stops(), most)
    text.echo(prompt)
    if not asked.logprobs:
        text.add_prompt([GeneratedToken(token) for token in tokens])
    return ReplyPart(request, text)


def _tokens(prompt: str, asked: MegatronFields, model: ServedModel) -> tuple[int, ...]:
    """Return the tokens of a prompt. add_BOS puts the beginning of a text, or the end of another one, in front."""
    tokens = model.encode(prompt, "prompts")
    if prompt and asked.add_BOS and not beginning_of(model.tokenizer):
        return (model.tokenizer.eod, *tokens)
    return tokens
