"""Generated text: greedy equals the argmax of whole forwards, sampled is the same on any number of ranks."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.errors import ConfigError
from megatron_ds.models.generation import Ending, Sampling, generate, next_token
from megatron_ds.mpu.group import solo
from tests.harness.gpt_runs import make_model
from tests.harness.plain_gpt import STYLES, logical_weights, plain_gpt
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

PROMPT = [3, 1, 36, 1, 5]
GREEDY = Sampling(temperature=0)


def continuation(config, weights, sampling, tp_size=1, count=9, **ending):
    def main(rank, world):
        tp = world.group("tp", tuple(range(tp_size)), rank)
        return list(
            generate(
                make_model(config, tp, weights),
                PROMPT,
                ending=Ending(count, **ending),
                sampling=sampling,
                tp=tp,
                vocab_size=config.vocab_size,
            )
        )

    ranks = run_ranks(tp_size, main)
    assert all(tokens == ranks[0] for tokens in ranks)
    return ranks[0]


@pytest.mark.parametrize("style", STYLES)
def test_greedy_text_is_the_argmax_of_a_forward_over_the_whole_text(style):
    config = replace(STYLES[style], hidden_dropout=0.5)
    weights = logical_weights(config, seed=1)
    text = list(PROMPT)
    for _ in range(9):
        logits = plain_gpt(
            weights, config, torch.tensor([text]), torch.arange(len(text))[None]
        )
        text.append(int(logits[0, -1].argmax()))
    assert continuation(config, weights, GREEDY) == text[5:]
    assert continuation(config, weights, GREEDY, tp_size=2) == text[5:]
    stop = text[7]
    assert (
        continuation(config, weights, GREEDY, stop=lambda token: token == stop)
        == text[5 : 5 + text[5:].index(stop) + 1]
    )


def test_a_document_does_not_end_before_the_tokens_asked_for():
    config = STYLES["gpt2"]
    weights = logical_weights(config, seed=1)
    end = continuation(config, weights, GREEDY, count=1)[0]
    free = continuation(
        config, weights, GREEDY, stop=lambda token: token == end, end=end
    )
    held = continuation(
        config,
        weights,
        GREEDY,
        tp_size=2,
        stop=lambda token: token == end,
        end=end,
        min_new_tokens=4,
    )
    assert free == [end] and len(held) > 4 and end not in held[:4]


def test_sampled_text_depends_on_the_seed_and_not_on_the_number_of_ranks():
    config = STYLES["gpt2"]
    weights = logical_weights(config, seed=1)
    texts = [
        continuation(config, weights, Sampling(seed=seed), tp_size=t)
        for seed in (1, 2)
        for t in (1, 2)
    ]
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_limits_leave_the_likeliest_tokens():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drawn = lambda **limits: {
        next_token(logits, Sampling(**limits), torch.Generator().manual_seed(i))
        for i in range(200)
    }
    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.81) == {0, 1, 2}
    assert drawn(top_p=0.4) == drawn(temperature=0) == {0}


@pytest.mark.parametrize(
    "wrong",
    [dict(temperature=-1.0), dict(top_k=-2), dict(top_p=0.0), dict(top_p=1.5)],
    ids=str,
)
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match="has no tokens"):
        next(
            generate(
                [], [], ending=Ending(1), sampling=GREEDY, tp=solo(), vocab_size=37
            )
        )
