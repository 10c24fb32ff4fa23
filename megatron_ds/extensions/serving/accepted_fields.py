"""`Harmless`: fields that clients send as a matter of course. Each asks for nothing here, or for what is so anyway.

IGNORED     changes no answer: names for bills and caches, hints about speed
noted(…)    would change an answer elsewhere; the first value is logged
only(…)     these values ask for what is so anyway; others are refused
"""

import json
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...console import shortened
from .refused_request import RefusedRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Harmless:
    """A field without an effect.

    only    all values that are accepted; None for any
    reason  a sentence for the message about other values
    note    why the field has no effect, which is logged once; "" for one that is not logged
    """

    only: tuple | None = None
    reason: str = ""
    note: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises RefusedRequest for a value that is not accepted."""
        if self.note:
            _log_once(name, self.note)
        if self.only is None or value in self.only:
            return
        raise RefusedRequest(
            f"{name} {shortened(json.dumps(value), 80)} is not supported. {self.reason}",
            name,
            code="unsupported_value",
        )


@cache
def _log_once(name: str, note: str) -> None:
    logger.warning("the field %s of a request has no effect: %s", name, note)


IGNORED = Harmless()


def only(*values: Any, reason: str = "Leave it out.") -> Harmless:
    """Return a field whose other values are refused."""
    return Harmless(values, reason)


def noted(reason: str) -> Harmless:
    """Return a field that is logged once and has no effect."""
    return Harmless(note=reason)


PENALTY = "Use repetition_penalty, which divides or multiplies the logits of tokens that occurred."
NO_BEAMS = "Texts are sampled or greedy here."
NO_LIMIT = "Sample with top_k, top_p and min_p."
TEXT_ALONE = "Answers are text. vLLM constrains them with the exported model."
# Of both of OpenAI's endpoints: OpenAI's own, then those of vLLM, llama.cpp and others.
OF_CLIENTS: dict[str, Harmless] = {
    **dict.fromkeys(
        "user metadata store service_tier prompt_cache_key prompt_cache_retention prompt_cache_options "
        "safety_identifier prediction".split(),
        IGNORED,
    ),
    "presence_penalty": only(0, reason=PENALTY),
    "frequency_penalty": only(0, reason=PENALTY),
    "logit_bias": only({}),
    "response_format": only({}, {"type": "text"}, reason=TEXT_ALONE),
    **dict.fromkeys("request_id cache_salt timeout cache_prompt".split(), IGNORED),
    "verbosity": noted("the model has no such setting"),
    "priority": noted("requests are served as they come"),
    "skip_special_tokens": noted("special tokens within a text are shown"),
    "spaces_between_special_tokens": IGNORED,
    "extra_body": only({}),
    "use_beam_search": only(False, reason=NO_BEAMS),
    "num_beams": only(1, reason=NO_BEAMS),
    "length_penalty": only(1, reason=NO_BEAMS),
    "early_stopping": only(False, reason=NO_BEAMS),
    "do_sample": only(True, reason="Set temperature to 0 for greedy texts."),
    "typical_p": only(1, reason=NO_LIMIT),
    "tfs_z": only(1, reason=NO_LIMIT),
    "top_a": only(0, reason=NO_LIMIT),
    "mirostat": only(0, reason=NO_LIMIT),
    "mirostat_mode": only(0, reason=NO_LIMIT),
    "include_stop_str_in_output": only(False, reason="Texts end before it."),
    "detokenize": only(True, reason="Answers have texts."),
    "return_tokens_as_token_ids": only(False, reason="Answers have texts."),
    "return_token_ids": only(False, reason="Answers have texts."),
    "truncate_prompt_tokens": only(reason="Send the end of the prompt alone."),
    "prompt_logprobs": only(reason="Use echo and logprobs of /v1/completions."),
    "allowed_token_ids": only([], reason=TEXT_ALONE),
    "bad_words": only([], reason=TEXT_ALONE),
    **dict.fromkeys(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs".split(),
        only([], {}, reason=TEXT_ALONE),
    ),
}
NO_CALLS = "Calls of tools are not read from answers here; vLLM does so with the exported model."
OF_CHATS: dict[str, Harmless] = {
    **OF_CLIENTS,
    "tools": only([], reason=NO_CALLS),
    "tool_choice": only("none", "auto", reason=NO_CALLS),
    "functions": only([], reason=NO_CALLS),
    "function_call": only("none", "auto", reason=NO_CALLS),
    "parallel_tool_calls": IGNORED,
    "modalities": only(["text"], reason=TEXT_ALONE),
    "audio": only(reason=TEXT_ALONE),
    "web_search_options": only(reason="The server reaches no network."),
    "documents": only([], reason="Write them into a message."),
    "add_generation_prompt": only(True, reason="A conversation is answered."),
    "continue_final_message": only(
        False, reason="Continue a text with /v1/completions."
    ),
    "add_special_tokens": only(False, reason="The template writes what begins a text."),
    "echo": only(False, reason="Use /v1/completions."),
    "chat_template": only(
        reason="The server has one: start it with --chat-template FILE."
    ),
    "include_reasoning": noted("reasoning is part of the text"),
}
OF_TEXTS: dict[str, Harmless] = {
    **OF_CLIENTS,
    "add_special_tokens": only(True, reason="Send tokens as the prompt."),
    "best_of": only(1, reason="Use n, and choose among the texts."),
    "suffix": only("", reason="Texts are continued at their end."),
}
NO_MEGATRON_BEAMS = "Texts are sampled or greedy here: remove it, or set top_k to 1."
NO_DECAY = "top_p is the same for all tokens: remove it."
OF_MEGATRON: dict[str, Harmless] = {
    "no_log": IGNORED,
    "top_p_decay": only(0, reason=NO_DECAY),
    "top_p_bound": only(0, reason=NO_DECAY),
    "prevent_newline_after_colon": only(False, reason="Remove it."),
    "beam_width": only(reason=NO_MEGATRON_BEAMS),
    "length_penalty": only(1, reason=NO_MEGATRON_BEAMS),
}
