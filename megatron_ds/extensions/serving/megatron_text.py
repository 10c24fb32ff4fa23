"""PUT /api of Megatron's text generation server: {"prompts": […], "tokens_to_generate": 64} → {"text": […]}."""

import secrets
from collections.abc import Sequence
from typing import Any

from ..generation.model_text import beginning_of
from ..generation.requests import GeneratedToken, Sampling
from .openai_reply import ReplyPart
from .refused_request import RefusedRequest
from .request_fields import IGNORED, RequestField, Values, read_fields
from .sampling_fields import MOST_TOKENS, SEEDS
from .served_model import ServedModel
from .served_text import ServedText

MOST_PROMPTS = 128
NO_BEAMS = "Texts are sampled or greedy here: remove it, or set top_k to 1."
NO_DECAY = "top_p is the same for all tokens: remove it."
# Texts that end a continuation, by the field that asks for them.
STOPS = {"stop_on_double_eol": "\n\n", "stop_on_eol": "\n"}
FIELDS: dict[str, RequestField] = {
    "prompts": RequestField("list of strings", least=1, most=MOST_PROMPTS),
    "tokens_to_generate": RequestField("integer", 64, 0, MOST_TOKENS),
    "logprobs": RequestField("boolean", False),
    "temperature": RequestField("number", 1.0, 0, 100),
    "top_k": RequestField("integer", 0, 0, 1000),
    "top_p": RequestField("number", 0.0, 0, 1),
    "top_p_decay": RequestField("number", 0, only=(0,), reason=NO_DECAY),
    "top_p_bound": RequestField("number", 0, only=(0,), reason=NO_DECAY),
    "add_BOS": RequestField("boolean", False),
    "stop_on_double_eol": RequestField("boolean", False),
    "stop_on_eol": RequestField("boolean", False),
    "prevent_newline_after_colon": RequestField(
        "boolean", False, only=(False,), reason="Remove it."
    ),
    "random_seed": RequestField("integer", -1, -1, SEEDS - 1),
    "no_log": IGNORED,
    "beam_width": RequestField("any", only=(), reason=NO_BEAMS),
    "length_penalty": RequestField("any", only=(1,), reason=NO_BEAMS),
    "stop_token": RequestField("integer", None, 0, MOST_TOKENS),
}


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
    values = read_fields(body, FIELDS, "prompts")
    _check(values)
    seed = values["random_seed"]
    if seed < 0:
        seed = secrets.randbelow(SEEDS)
    parts = []
    for number, prompt in enumerate(values["prompts"]):
        sampling = Sampling(
            temperature=float(values["temperature"]),
            top_k=values["top_k"],
            top_p=float(values["top_p"]) or 1.0,
            seed=(seed + number) % SEEDS,  # prompts are independent samples
        )
        parts.append(_part(prompt, values, model, sampling))
    return MegatronReply(parts, values["logprobs"])


def _check(values: Values) -> None:
    """Raises RefusedRequest for fields that contradict each other."""
    if not values["tokens_to_generate"] and not values["logprobs"]:
        raise RefusedRequest(
            "tokens_to_generate 0 needs logprobs: true, since nothing else is answered.",
            "tokens_to_generate",
        )
    if not values["temperature"]:
        raise RefusedRequest(
            "temperature is 0; the range is above 0, to 100. For greedy texts set top_k to 1.",
            "temperature",
        )
    if values["top_k"] and values["top_p"]:
        raise RefusedRequest("top_k and top_p are both given. Choose one.", "top_p")
    if "" in values["prompts"] and not values["add_BOS"]:
        raise RefusedRequest(
            "an empty prompt needs add_BOS: true, which puts a token in front.",
            "prompts",
        )


def _part(
    prompt: str, values: Values, model: ServedModel, sampling: Sampling
) -> ReplyPart:
    tokens = _tokens(prompt, values, model)
    most = values["tokens_to_generate"]
    end = values["stop_token"]
    model.check_ids([] if end is None else [end], "stop_token")
    request = model.request(
        "prompts",
        tokens=tokens,
        sampling=sampling,
        max_new_tokens=max(most, 1),
        stop_tokens=model.end_tokens if end is None else frozenset((end,)),
        alternatives=0 if values["logprobs"] else None,
        scores_prompt=values["logprobs"],
    )
    stops = [text for name, text in STOPS.items() if values[name]]
    text = ServedText(model.tokenizer, tokens, stops, most)
    text.echo(prompt)
    if not values["logprobs"]:
        text.add_prompt([GeneratedToken(token) for token in tokens])
    return ReplyPart(request, text)


def _tokens(prompt: str, values: Values, model: ServedModel) -> tuple[int, ...]:
    """Return the tokens of a prompt. add_BOS puts the beginning of a text, or the end of another one, in front."""
    tokens = model.encode(prompt, "prompts")
    if prompt and values["add_BOS"] and not beginning_of(model.tokenizer):
        return (model.tokenizer.eod, *tokens)
    return tokens
