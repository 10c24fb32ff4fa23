"""Runs with --distill-from are those of plain torch, with teachers of this package and of Hugging Face."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy, kl_div

from megatron_ds.compat.conversion.convert_checkpoint import run_tool as convert
from megatron_ds.data.samples.gpt_data import MockDataset
from megatron_ds.data.tokenizers.base import NullTokenizer
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.distillation import teacher_config
from tests.harness.pretraining import (
    MOCK,
    VOCAB,
    losses,
    records,
    run_pretrain,
    train,
)

pytestmark = pytest.mark.processes

ROOM = 16
SIZE = 4
STEPS = 2
RATE = 1e-3
WEIGHT, TEMPERATURE = 0.7, 2.0
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
).split()
WIDE = "--num-layers 3 --hidden-size 48 --num-attention-heads 6 --init-method-std 0.3".split()
STAGES = (
    "--dry-run --world-size 4 --num-layers 4 --pipeline-model-parallel-size 4".split()
)
# Each step is computed twice, and the first micro-batch of the next one before it.
TWICE = "--rerun-bad-steps --rerun-steps-interval 1 --grad-noise-scale --grad-noise-scale-interval 1"
PLAIN = (
    f"--lr {RATE} --min-lr {RATE} --lr-decay-style constant --lr-warmup-iters 0 --weight-decay 0 --clip-grad 0"
).split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`teacher` and `student`, weights of one step; `teacher_hf` and `student_hf`, the same for transformers."""
    folder = tmp_path_factory.mktemp("distill")
    for name, more in (("teacher", WIDE), ("student", [])):
        save = str(folder / name)
        train(1, [*MOCK, *LLAMA, *PLAIN, *more, "--train-iters", "1", "--save", save])
        convert(["--load", save, "--save", f"{save}_hf", "--to", "huggingface"])
    return folder


def job(folder, teacher: str, *more) -> list[str]:
    return [
        *(*MOCK, *LLAMA, *PLAIN, "--train-iters", str(STEPS)),
        *("--pretrained-checkpoint", str(folder / "student")),
        *("--distill-from", str(folder / teacher)),
        *("--distill-weight", str(WEIGHT), "--distill-temperature", str(TEMPERATURE)),
        *map(str, more),
    ]


def in_plain_torch(folder, reverse: bool, count: int | None) -> list[float]:
    """The losses of the steps. With `count` the likeliest tokens of the teacher, and all others as one."""
    read = transformers.AutoModelForCausalLM.from_pretrained
    model = read(folder / "student_hf")
    teacher = read(folder / "teacher_hf").requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), RATE, eps=1e-8)
    samples = MockDataset(
        STEPS * SIZE, seq_length=ROOM, vocab_size=VOCAB + 1, eod=VOCAB, seed=1234
    )
    found = []
    for first in range(0, STEPS * SIZE, SIZE):
        rows = [samples[i]["tokens"] for i in range(first, first + SIZE)]
        tokens = torch.stack([torch.as_tensor(row) for row in rows])
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)
        with torch.no_grad():
            theirs = teacher(tokens[:, :-1]).logits.flatten(0, 1)
        p, q = ((x / TEMPERATURE).softmax(-1) for x in (theirs, logits))
        if count is not None:
            kept = p.topk(count).indices
            p, q = (
                torch.cat([x.gather(1, kept), 1 - x.gather(1, kept).sum(1)[:, None]], 1)
                for x in (p, q)
            )
        target, of = (p, q) if reverse else (q, p)
        apart = kl_div(target.log(), of, reduction="none").sum(1).mean()
        loss = (1 - WEIGHT) * cross_entropy(logits, tokens[:, 1:].flatten())
        loss = loss + WEIGHT * TEMPERATURE**2 * apart
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "ranks, teacher, words, reverse, count",
    [
        (1, "teacher_hf", f"--micro-batch-size 2 {TWICE}", False, None),
        (2, "teacher", "--tensor-model-parallel-size 2 --distill-top-k 7", False, 7),
        (2, "teacher", "--zero-stage 3 --distill-divergence reverse", True, None),
    ],
)
def test_a_run_has_the_losses_of_plain_torch(
    folder, tmp_path, ranks, teacher, words, reverse, count
):
    train(ranks, job(folder, teacher, "--save", tmp_path / "run", *words.split()))
    expected = in_plain_torch(folder, reverse, count)
    assert list(losses(tmp_path / "run").values()) == pytest.approx(expected, rel=1e-5)
    last = records(tmp_path / "run")[-1]
    parts = (1 - WEIGHT) * last["language_loss"]
    parts += WEIGHT * TEMPERATURE**2 * last["divergence"]
    assert parts == pytest.approx(last["loss"], rel=1e-5)
    assert not records(tmp_path / "run", "rerun")
    # The checkpoint is the student's alone.
    [step] = (tmp_path / "run").glob("iter_*")
    saved = json.loads((step / "run.json").read_text())
    assert saved["teacher"]["folder"] == str(folder / teacher)
    assert saved["identity"]["model"]["hidden_size"] == 32


def test_a_run_that_continues_with_another_teacher_says_so(folder, tmp_path):
    run = str(tmp_path / "run")
    argv = [*job(folder, "teacher"), "--save", run, "--load", run]
    train(1, [*argv, "--train-iters", "1"])
    [same] = train(1, argv)
    assert "was taught by" not in same.err + same.out
    [other] = train(
        1, [*argv, "--distill-from", str(folder / "student"), "--train-iters", "3"]
    )
    text = other.err + other.out
    assert f"was taught by {folder / 'teacher'}, iteration" in text
    assert f"goes on with {folder / 'student'}" in text


@pytest.mark.quick
def test_without_a_teacher_a_run_learns_otherwise(folder, tmp_path):
    argv = job(folder, "teacher")
    at = argv.index("--distill-from")
    train(1, [*argv[:at], "--save", str(tmp_path / "alone")])
    apart = in_plain_torch(folder, False, None)
    assert list(losses(tmp_path / "alone").values()) != pytest.approx(apart, rel=0.05)


def test_a_teacher_that_is_broken_is_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder / "teacher_hf", broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    [ended] = run_pretrain(1, job(folder, broken))
    assert ended.code != 0
    assert "loss is nan, divergence nan at iteration 1" in ended.err, ended.err


@pytest.mark.quick
@pytest.mark.parametrize(
    "words, problem",
    [
        (["--vocab-size", "99"], "a vocabulary of 62 tokens, and this run has 100"),
        (["--dpo"], "each replace the loss of the model"),
        (["--model", "bert"], "BERT predicts masked tokens"),
        (["--label-smoothing", "0.1"], "take the place of smoothed labels"),
        (["--distill-top-k", "62"], "--distill-top-k 62 of a vocabulary of 62 tokens"),
        (["--distill-from", "/nowhere"], "--distill-from"),
        (["--seq-length", "32"], "--seq-length 32 is longer than"),
        (STAGES, "is less than --pipeline-model-parallel-size 4: each"),
    ],
)
def test_what_does_not_fit_is_refused(folder, words, problem):
    argv = [word for word in job(folder, "teacher")]
    at = argv.index("--pretrained-checkpoint")
    [ended] = run_pretrain(1, [*argv[:at], *argv[at + 2 :], *words])
    assert ended.code == 2 and problem in ended.err, ended.err


def test_tokens_with_other_ids_are_named_and_only_special_ones_may_have_them(
    monkeypatch, caplog
):
    tokens = lambda *names: SimpleNamespace(vocab={n: i for i, n in enumerate(names)})
    letters = "abcdefghijklmnopqrst"
    theirs = tokens(*letters)
    monkeypatch.setattr(teacher_config, "_saved", lambda folder: (None, theirs))
    check_tokens = teacher_config.check_tokens
    check_tokens("t", tokens(*letters))
    check_tokens("t", NullTokenizer(20))
    assert not caplog.records
    check_tokens("t", tokens(*letters[:-1], "<end>"))
    assert "of 20 tokens of the teacher 1 have other ids" in caplog.text
    assert "such as 't', 19 there and None here" in caplog.text
    with pytest.raises(ConfigError, match="20 have other ids .* 'a', 0 there and 19"):
        check_tokens("t", tokens(*reversed(letters)))
    theirs = NullTokenizer(20)
    check_tokens("t", tokens(*letters))


def test_a_dry_run_counts_the_teacher(folder):
    [ended] = run_pretrain(1, [*job(folder, "teacher"), "--dry-run"])
    assert ended.code == 0, ended.err
    assert "the teacher's weights and predictions" in ended.out
