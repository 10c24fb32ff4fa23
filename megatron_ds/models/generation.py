"""Text from a model: one token at a time with a key-value cache, greedy or sampled.

Every tensor-parallel rank gathers the same logits and draws with its own generator of the same seed, so all
agree on the next token without a message.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..batch.batch import Batch
from ..batch.ledger import DISCARDING
from ..errors import ConfigError
from ..mpu.collectives import all_gather
from ..mpu.group import Group
from .attention import make_caches
from .stage_modules import run_layers


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    temperature  divides the logits; 0 means greedy: always the likeliest token
    top_k        only the k likeliest tokens; 0 for no such limit
    top_p        only the likeliest tokens that together hold this probability (nucleus; Holtzman et al. 2020,
                 arXiv:1904.09751, section 3.1); 1 for no such limit
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0:
            raise ConfigError(
                f"temperature={self.temperature} is negative. Use 0 for greedy, around 0.7 to "
                "1 to sample."
            )
        if self.top_k < 0:
            raise ConfigError(
                f"top_k={self.top_k} is negative. Use 0 for no limit, or the number of tokens "
                "to sample from."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p={self.top_p} is not a probability. Use a number in (0, 1]; 1 for no "
                "limit."
            )


@dataclass(frozen=True)
class Ending:
    """When a generated text ends.

    stop  true for a token after which the text ends; it is the last one
    end   a token that is not generated among the first `min_new_tokens`
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop: Callable[[int], bool] = lambda token: False
    end: int | None = None


def next_token(
    logits: torch.Tensor, sampling: Sampling, generator: torch.Generator
) -> int:
    """Choose from `logits` [V] (true vocabulary, on the CPU)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores = logits.double() / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
    probabilities = scores.softmax(dim=0)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # what the likelier tokens hold already
        probabilities[order[before >= sampling.top_p]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))


def generate(
    modules: Sequence[nn.Module],
    prompt: Sequence[int],
    *,
    ending: Ending,
    sampling: Sampling,
    tp: Group,
    vocab_size: int,
) -> Iterator[int]:
    """Yield the tokens that follow `prompt`. modules: the whole model, all layers in order.

    Collective over tp: one all-gather of [V/t] logits per token.
    """
    if not prompt:
        raise ConfigError(
            "the prompt has no tokens, so there is no text to continue. Give a prompt of at "
            "least one token."
        )
    # Keys and values of all tokens so far are kept.
    caches = make_caches(modules, 1, len(prompt) + ending.max_new_tokens)
    generator = torch.Generator().manual_seed(sampling.seed)
    device = next(modules[0].parameters()).device
    tokens = list(prompt)
    position = 0
    with torch.inference_mode():
        for count in range(ending.max_new_tokens):
            logits = run_layers(
                modules, None, _batch(tokens, position, device), caches
            )[-1:, 0]  # [1, Vp/t]
            position = len(tokens) if not position else position + 1
            # Every rank draws the same token from the same logits.
            whole = all_gather(logits.float(), tp, dim=-1)[0, :vocab_size].cpu()
            if ending.end is not None and count < ending.min_new_tokens:
                whole[ending.end] = -torch.inf
            token = next_token(whole, sampling, generator)
            yield token
            if ending.stop(token):
                return
            tokens = [token]


def _batch(tokens: Sequence[int], position: int, device: torch.device) -> Batch:
    ids = torch.tensor([tokens], device=device)
    positions = torch.arange(position, position + len(tokens), device=device)[None]
    return Batch(
        ids,
        ids,
        torch.ones(ids.shape, device=device),
        positions,
        sample_ids=(0,),
        training=False,
        ledger=DISCARDING,
    )
