"""`HarnessModel`: this package's models for lm-evaluation-harness, whose package this module imports.

It lives on rank 0 alone; its scores come from all ranks (leading_rank.py). The harness therefore sees a model
of one process, whatever the layout is.
"""

import math
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ...data.tokenizers import Tokenizer
from ...errors import ConfigError
from ..generation.model_text import beginning_of, plain_ids
from .greedy_text import Prompt, continue_greedily
from .leading_rank import Score
from .score_plan import ScoreRequest

AT_ONCE = 4096  # requests of one call of `score`
SAMPLING = ("do_sample", "temperature")


@register_model("megatron_ds")
class HarnessModel(TemplateLM):
    """score: of `lead`; max_length: positions of the model; ends: tokens that end a text, besides the end of a
    document."""

    max_gen_toks = 256

    def __init__(
        self,
        score: Score,
        tokenizer: Tokenizer,
        max_length: int,
        ends: frozenset[int] = frozenset(),
    ):
        super().__init__()
        self.score = score
        self.words = tokenizer
        self.max_length = max_length
        self.ends = ends
        self.beginning = beginning_of(tokenizer)

    @property
    def eot_token_id(self) -> int:
        return self.words.eod

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text without context: the beginning of a text, or the end of the last one."""
        return self.beginning[-1] if self.beginning else self.words.eod

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text, after the beginning of a text if the tokenizer has one."""
        ids = plain_ids(self.words, string)
        return ids if add_special_tokens is False else [*self.beginning, *ids]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text; those longer than the model are read in windows."""
        pairs = []
        counts = []
        for request in requests:
            cut = get_rolling_token_windows(
                self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [(None, *make_disjoint_window(window)) for window in cut]
            pairs += found
            counts.append(len(found))
        totals = iter(self._loglikelihood_tokens(pairs))
        return [math.fsum(next(totals)[0] for _ in range(count)) for count in counts]

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Greedy continuations. Raises ConfigError for a task that samples, or leaves no room for a prompt."""
        prompts = [self._prompt(*request.args) for request in requests]
        return continue_greedily(
            self.score, self.words, prompts, self.max_length, self.ends
        )

    def _prompt(self, context: str, options: dict) -> Prompt:
        wanted = normalize_gen_kwargs(options, self.max_gen_toks)
        if wanted.get("do_sample") or wanted.get("temperature"):
            raise ConfigError(
                f"a task asks for samples ({ {n: wanted.get(n) for n in SAMPLING} }), and evaluation continues "
                "texts greedily. Set do_sample: false in its generation_kwargs."
            )
        count = int(wanted["max_gen_toks"])
        room = self.max_length - count
        if room < 1:
            raise ConfigError(
                f"a task generates up to {count} tokens, and the model has {self.max_length} positions, which "
                "leaves none for the prompt. Lower max_gen_toks in its generation_kwargs."
            )
        until = tuple(end for end in wanted["until"] if end)
        tokens = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        return Prompt(tuple(tokens), until, count)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability of the second list of ids after the first, whether it is the greedy continuation).

        A context that is too long loses its beginning.
        """
        asked = []
        for _, context, continuation in requests:
            tokens = tuple([*context, *continuation][-self.max_length - 1 :])
            asked.append(ScoreRequest(tokens, len(continuation)))
        found = []
        for first in range(0, len(asked), AT_ONCE):
            found += self.score(asked[first : first + AT_ONCE])
        return [(scored.total, scored.is_greedy) for scored in found]
