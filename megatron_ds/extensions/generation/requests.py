"""What is asked of a generator, and what it returns."""

from dataclasses import dataclass, field

from ...errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Each limit keeps some of the tokens that those before it left.

    temperature         divides the logits; 0 means greedy: always the likeliest token
    top_k               only the k likeliest tokens; 0 for no such limit
    top_p               only the likeliest tokens that together hold this probability (nucleus; Holtzman et al.
                        2020, arXiv:1904.09751, section 3.1); 1 for no such limit
    min_p               only tokens with at least this share of the likeliest one's probability (Nguyen et al. 2024,
                        arXiv:2407.01082, section 3); 0 for no such limit
    repetition_penalty  divides positive logits, and multiplies negative ones, of tokens in the text so far (Keskar
                        et al. 2019, arXiv:1909.05858, section 4.1); 1 for none
    seed                the same seed gives the same text, whatever the layout and the other requests are
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature={self.temperature} is not a number from 0 up. Use 0 for greedy, around 0.7 to 1 to "
                "sample."
            )
        if self.top_k < 0:
            raise ConfigError(
                f"top_k={self.top_k} is negative. Use 0 for no limit, or the number of tokens to sample from."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p={self.top_p} is not a probability. Use a number in (0, 1]; 1 for no limit."
            )
        if not 0 <= self.min_p <= 1:
            raise ConfigError(
                f"min_p={self.min_p} is not a share of a probability. Use a number in [0, 1]; 0 for no limit."
            )
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty} is not a positive number. Use 1 for none, and around "
                "1.2 against repetitions."
            )


@dataclass(frozen=True)
class GenerationRequest:
    """A text to be continued.

    tokens          of the prompt, at least one
    max_new_tokens  after which the text ends
    min_new_tokens  among which no stop token is chosen
    stop_tokens     end the text; the one that does is its last token
    alternatives    None: no log-probabilities. n: of each chosen token, and the n likeliest tokens with theirs
    scores_prompt   the same of the prompt's own tokens
    """

    tokens: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_tokens: frozenset[int] = field(default_factory=frozenset)
    alternatives: int | None = None
    scores_prompt: bool = False

    def __post_init__(self):
        if not self.tokens:
            raise ConfigError(
                "the prompt has no tokens, so there is no text to continue. Give a prompt of at least one token."
            )
        if self.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens={self.max_new_tokens} generates no text. Use a positive number."
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens={self.min_new_tokens} is not between 0 and max_new_tokens={self.max_new_tokens}. "
                "Lower it, or raise max_new_tokens."
            )
        if self.alternatives is not None and self.alternatives < 0:
            raise ConfigError(
                f"alternatives={self.alternatives} is negative. Use 0 for the log-probability of the chosen token "
                "alone, or the number of likeliest tokens to return."
            )
        if self.scores_prompt and self.alternatives is None:
            raise ConfigError(
                "scores_prompt asks for log-probabilities of the prompt, and alternatives=None for none. Give the "
                "number of alternatives, 0 or more."
            )


@dataclass(frozen=True)
class GeneratedToken:
    """A token of a text.

    log_prob      natural logarithm of the probability that the model gives it, before temperature, limits and
                  penalties; None where the request asks for none, and of a prompt's first token
    alternatives  (token, log-probability) of the likeliest tokens in its place, the likeliest first
    finish        "stop" for a stop token, "length" for the last token there is room for, None for any other
    """

    token: int
    log_prob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    finish: str | None = None
