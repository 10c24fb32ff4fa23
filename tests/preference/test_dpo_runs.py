"""Runs with --dpo are those of plain torch; they continue with the reference of their first step."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import logsigmoid

from megatron_ds.compat.conversion.convert_checkpoint import run_tool as convert
from megatron_ds.config import parse
from megatron_ds.extensions.preference import reference_scores
from tests.harness.answer_pairs import write_pairs
from tests.harness.pretraining import (
    MOCK,
    TINY,
    VOCAB,
    losses,
    records,
    run_pretrain,
    train,
)

pytestmark = pytest.mark.processes

ROOM = 32
SIZE = 4
RATE = 1e-3
BETA = 0.3
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--num-query-groups 2 --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
    f"--seq-length {ROOM} --max-position-embeddings {ROOM}"
).split()
PLAIN = (
    f"--lr {RATE} --min-lr {RATE} --lr-decay-style constant --lr-warmup-iters 0 --weight-decay 0 --clip-grad 0"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`base`, the weights of three steps; `hf`, the same for transformers; `pairs`, a corpus."""
    folder = tmp_path_factory.mktemp("dpo")
    base = str(folder / "base")
    train(1, [*MOCK, *LLAMA, "--train-iters", "3", "--save", base])
    convert(["--load", base, "--save", str(folder / "hf"), "--to", "huggingface"])
    write_pairs(folder / "pairs", 10, VOCAB - 1, ROOM // 2)
    return folder


def job(folder, steps: int, *more) -> list[str]:
    return [
        *(*TINY, *LLAMA, *PLAIN, "--dpo", "--dpo-beta", str(BETA)),
        *("--data-path", str(folder / "pairs"), "--split", "100,0,0"),
        *("--pretrained-checkpoint", str(folder / "base")),
        *("--train-iters", str(steps), *map(str, more)),
    ]


def order(count: int, samples: int) -> list[int]:
    """The pairs of the first samples of a run."""
    epochs = [
        np.random.default_rng((1234, epoch)).permutation(count)
        for epoch in range(-(-samples // count))
    ]
    return np.concatenate(epochs)[:samples].tolist()


def log_prob(model, tokens: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    """The log-probability of the learned tokens of one sequence together."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    found = model(ids[None, :-1]).logits[0].log_softmax(-1)
    picked = found.gather(1, ids[1:, None]).squeeze(1)
    return (picked * torch.from_numpy(mask[1:].astype(np.float32))).sum()


def in_plain_torch(folder, steps: int, smoothing: float) -> list[float]:
    """The losses of the steps."""
    masks = write_pairs(folder / "again", 10, VOCAB - 1, ROOM // 2)
    read = transformers.AutoModelForCausalLM.from_pretrained
    model = read(folder / "hf")
    frozen = read(folder / "hf").requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), RATE, eps=1e-8)
    found = []
    pairs = order(10, steps * SIZE)
    for first in range(0, len(pairs), SIZE):
        optimizer.zero_grad()
        total = 0.0
        for pair in pairs[first : first + SIZE]:
            rewards = []
            for number in (2 * pair, 2 * pair + 1):
                sequence = masks.corpus.get(number), masks.get(number)
                apart = log_prob(model, *sequence) - log_prob(frozen, *sequence)
                rewards.append(BETA * apart)
            margin = rewards[0] - rewards[1]
            total = total - (1 - smoothing) * logsigmoid(margin)
            total = total - smoothing * logsigmoid(-margin)
        loss = total / SIZE
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.quick
@pytest.mark.parametrize(
    "ranks, words, smoothing",
    [
        (1, "--micro-batch-size 2", 0.0),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel", 0.1),
    ],
)
def test_a_run_has_the_losses_of_plain_torch(folder, tmp_path, ranks, words, smoothing):
    save = tmp_path / "run"
    more = ["--save", save, "--dpo-label-smoothing", smoothing, *words.split()]
    train(ranks, job(folder, 4, *more))
    expected = in_plain_torch(folder, 4, smoothing)
    assert list(losses(save).values()) == pytest.approx(expected, rel=1e-5)
    assert expected[0] == pytest.approx(np.log(2)) and expected[-1] < 0.9 * np.log(2)
    last = records(save)[-1]
    assert last["reward_margin"] > 0 and 0 < last["reward_accuracy"] <= 1
    apart = last["reward_chosen"] - last["reward_rejected"]
    assert apart == pytest.approx(last["reward_margin"], abs=1e-6)


def test_a_run_continues_with_the_reference_of_its_first_step(folder, tmp_path):
    whole, parts, again = (tmp_path / name for name in ("whole", "parts", "again"))
    cache = ["--data-cache-path", tmp_path / "cache"]
    train(1, job(folder, 3, *cache, "--save", whole))
    train(1, job(folder, 1, *cache, "--save", parts))
    layout = ["--tensor-model-parallel-size", "2"]
    train(2, job(folder, 3, *cache, *layout, "--load", parts, "--save", again))
    expected = {step: losses(whole)[step] for step in (2, 3)}
    assert losses(again) == pytest.approx(expected, rel=1e-5)
    # Runs that begin with the same weights share the scores; without them none continues.
    assert len(list((tmp_path / "cache").glob("*Preference*.npy"))) == 1
    elsewhere = ["--data-cache-path", tmp_path / "other", "--load", parts]
    [ended] = run_pretrain(1, job(folder, 3, *elsewhere))
    assert ended.code == 2 and "no log-probabilities of the reference" in ended.err


def test_the_reference_scores_the_pairs_that_a_run_reaches_and_no_others(
    folder, tmp_path
):
    save, whole = tmp_path / "run", tmp_path / "whole"
    cache = ["--data-cache-path", tmp_path / "cache"]
    [first] = run_pretrain(1, job(folder, 1, *cache, "--save", save))
    assert "4 pairs scored by the reference" in first.out + first.err
    assert "of 4 that the run reaches and 10 in all" in first.out + first.err
    [stored] = (tmp_path / "cache").glob("*Preference*.npy")
    is_scored = ~np.isnan(np.load(stored)).any(axis=1)
    assert np.flatnonzero(is_scored).tolist() == sorted(order(10, SIZE))
    # A run that continues further reads them again for the others.
    [second] = run_pretrain(1, job(folder, 3, *cache, "--load", save, "--save", save))
    assert "6 pairs scored by the reference" in second.out + second.err
    train(1, job(folder, 3, "--data-cache-path", tmp_path / "else", "--save", whole))
    assert losses(save) == pytest.approx(losses(whole), rel=1e-5)
    [other] = (tmp_path / "else").glob("*Preference*.npy")
    np.testing.assert_allclose(np.load(stored), np.load(other), rtol=1e-5)


@pytest.mark.parametrize("change", ["removed", "trained on"])
def test_a_run_does_not_continue_to_other_pairs_without_the_weights_of_its_first_step(
    folder, tmp_path, change
):
    save, began = tmp_path / "run", tmp_path / "began"
    shutil.copytree(folder / "base", began)
    words = ["--data-cache-path", tmp_path / "cache", "--pretrained-checkpoint", began]
    train(1, job(folder, 1, *words, "--save", save))
    if change == "removed":
        shutil.rmtree(began)
    else:
        more = ["--load", began, "--save", began]
        train(1, [*MOCK, *LLAMA, "--train-iters", "4", *map(str, more)])
    [ended] = run_pretrain(1, job(folder, 2, *words, "--load", save))
    assert ended.code == 2 and "its first start did not" in ended.err
    assert ("is at step 4" if change == "trained on" else "no complete") in ended.err


def test_a_run_continues_in_another_number_format(folder, tmp_path):
    save = tmp_path / "run"
    cache = ["--data-cache-path", tmp_path / "cache"]
    stop = ["--exit-interval", "1"]
    train(1, job(folder, 3, *cache, *stop, "--save", save))
    [stored] = (tmp_path / "cache").glob("*Preference*.npy")
    [ended] = run_pretrain(1, job(folder, 3, *cache, "--bf16", "--load", save))
    assert ended.code == 0 and "pairs scored" not in ended.out + ended.err
    assert list((tmp_path / "cache").glob("*Preference*.npy")) == [stored]


def test_a_corpus_that_was_made_again_with_the_same_lengths_has_other_scores(
    folder, tmp_path
):
    cache = ["--data-cache-path", tmp_path / "cache"]
    for suffix in (".bin", ".idx", ".mask.bin"):
        shutil.copy(folder / f"pairs{suffix}", tmp_path)
    own = ["--data-path", tmp_path / "pairs"]
    train(1, job(folder, 1, *cache, *own, "--save", tmp_path / "one"))
    ids = np.memmap(tmp_path / "pairs.bin", np.uint16, "r+")
    ids[:] = (ids + 1) % (VOCAB - 1)
    ids.flush()
    train(1, job(folder, 1, *cache, *own, "--save", tmp_path / "two"))
    # The loss of the first step is ln 2 only if the reference has scored these answers.
    assert losses(tmp_path / "two")[1] == pytest.approx(np.log(2), rel=1e-6)


def test_other_frozen_weights_or_positions_have_a_reference_of_their_own(
    folder, tmp_path
):
    cache = ["--data-cache-path", tmp_path / "cache", "--lora-rank", "2"]
    for number, words in enumerate(
        ([], ["--lora-base-bits", "4"], ["--rotary-base", "100"])
    ):
        save = tmp_path / str(number)
        train(1, job(folder, 1, *cache, *words, "--save", save))
        assert losses(save)[1] == pytest.approx(np.log(2), rel=1e-6)
    assert len(list((tmp_path / "cache").glob("*Preference*.npy"))) == 3


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--sft"], "error: --dpo with --sft: one trains on pairs of answers"),
        (["--calculate-per-token-loss"], "the loss is a mean over pairs"),
        (["--seq-length", "4"], "Use a larger --seq-length"),
    ],
)
def test_what_does_not_fit_is_refused(folder, words, problem):
    [ended] = run_pretrain(1, job(folder, 1, *words))
    assert ended.code == 2 and problem in ended.err, ended.err


def test_answers_alone_are_not_trained_on_a_corpus_of_pairs(folder):
    words = [
        word
        for word in job(folder, 1)
        if word not in ("--dpo", "--dpo-beta", str(BETA))
    ]
    [ended] = run_pretrain(1, [*words, "--sft"])
    assert ended.code == 2 and "pairs of answers" in ended.err, ended.err


def test_dropout_is_that_of_the_reference_unless_it_is_given():
    words = " ".join([*TINY, "--dpo", "--data-path", "pairs", "--train-iters", "9"])
    words = words.replace("--hidden-dropout 0.1 --attention-dropout 0.1", "").split()
    model = parse(words).model
    assert model.hidden_dropout == model.attention_dropout == 0
    given = parse([*words, "--hidden-dropout", "0.2"]).model
    assert (given.hidden_dropout, given.attention_dropout) == (0.2, 0)


@pytest.mark.parametrize(
    "words, largest",
    [([], None), (["--lora-rank", "2", "--lora-dropout", "0.3"], "0.3")],
)
def test_dropout_of_adapters_is_warned_of_too(words, largest, caplog):
    dpo = ["--dpo", "--data-path", "pairs", "--hidden-dropout", "0"]
    config = parse(
        [*TINY, "--train-iters", "9", *dpo, "--attention-dropout", "0", *words]
    )
    engine = SimpleNamespace(config=config, mesh=SimpleNamespace(rank=0))
    reference_scores._warn_of_dropout(engine)
    found = [record.getMessage() for record in caplog.records]
    assert [f"(up to {largest})" in text for text in found] == [True] * len(words[:1])
