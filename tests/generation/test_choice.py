"""Tokens are chosen as transformers' processors of logits would leave them, with one number a token."""

import pytest
import torch

from megatron_ds.errors import ConfigError
from megatron_ds.extensions.generation.choice import NO_TOKEN, Pick, choose, uniform
from megatron_ds.extensions.generation.requests import Sampling
from megatron_ds.extensions.generation.token_limits import limited

pytestmark = pytest.mark.plan

V = 50
SAMPLINGS = [
    Sampling(),
    Sampling(top_k=7),
    Sampling(top_k=V + 9),
    Sampling(top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05),
]


def scores(rows):
    return 2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(1))


def test_limits_leave_the_tokens_that_those_of_transformers_leave():
    transformers = pytest.importorskip("transformers")
    found = limited(scores(len(SAMPLINGS)).double(), SAMPLINGS)
    for row, sampling in enumerate(SAMPLINGS):
        expected = scores(len(SAMPLINGS))[row : row + 1].double()
        if sampling.top_k:
            expected = transformers.TopKLogitsWarper(sampling.top_k)(None, expected)
        if sampling.top_p < 1:
            expected = transformers.TopPLogitsWarper(sampling.top_p)(None, expected)
        if sampling.min_p:
            expected = transformers.MinPLogitsWarper(sampling.min_p)(None, expected)
        assert torch.equal(found[row], expected[0]), sampling
    assert found[0].isfinite().all() and not found[1:].isfinite().all()


def test_tokens_of_the_text_are_penalized_as_in_transformers():
    transformers = pytest.importorskip("transformers")
    logits = scores(1)
    seen = logits[0].topk(3).indices.tolist() + logits[0].neg().topk(2).indices.tolist()
    penalized = transformers.RepetitionPenaltyLogitsProcessor(1.9)
    expected = penalized(torch.tensor([seen]), logits.clone())
    sampling = Sampling(0.0, repetition_penalty=1.9)
    ((token, *_),) = choose(logits, [Pick(sampling, seen=frozenset(seen))], 0).tolist()
    assert token == expected.argmax() != logits.argmax()


def test_draws_have_the_probabilities_of_the_softmax():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    count = 4000
    picks = [Pick(Sampling(seed=i // 2), step=i % 2) for i in range(count)]
    drawn = choose(logits.expand(count, -1), picks, 0)[:, 0].long()
    shares = torch.bincount(drawn, minlength=4) / count
    torch.testing.assert_close(shares, logits.exp()[0], rtol=0, atol=0.03)
    numbers = uniform([("a", i) for i in range(count)], torch.device("cpu"))
    assert 0 <= numbers.min() < 0.01 and 0.99 < numbers.max() < 1


def test_log_probabilities_are_those_of_the_model_whatever_is_drawn():
    logits = scores(3)
    picks = [
        Pick(Sampling(2.0, top_k=3, seed=4), alternatives=2),
        Pick(Sampling(0.0), given=11, alternatives=0),
        Pick(Sampling(0.0), forbidden=frozenset([int(logits[2].argmax())])),
    ]
    found = choose(logits, picks, 2)
    log_probs = logits.double().log_softmax(-1)
    tokens = found[:, 0].long()
    assert tokens[1] == 11 and tokens[2] == logits[2].topk(2).indices[1]
    torch.testing.assert_close(found[:, 1], log_probs.gather(1, tokens[:, None])[:, 0])
    best = log_probs.topk(2)
    assert torch.equal(found[:, 2:4].long(), best.indices)
    torch.testing.assert_close(found[:, 4:], best.values)


@pytest.mark.parametrize("temperature", [1e-308, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature):
    logits = scores(3)
    found = choose(logits, [Pick(Sampling(temperature, top_p=0.9))] * 3, 0)
    assert torch.equal(found[:, 0].long(), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_numbers_or_allowed_tokens_there_is_no_token(temperature):
    logits = scores(3)
    logits[0, 7] = torch.nan
    nothing = frozenset(range(V))
    picks = [Pick(Sampling(temperature), forbidden=f) for f in ((), nothing, ())]
    found = choose(logits, picks, 0)[:, 0].tolist()
    assert found[:2] == [NO_TOKEN, NO_TOKEN] and 0 <= found[2] < V


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=-1.0),
        dict(top_k=-2),
        dict(top_p=0.0),
        dict(top_p=1.5),
        dict(min_p=1.5),
        dict(repetition_penalty=0.0),
    ],
    ids=str,
)
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)
