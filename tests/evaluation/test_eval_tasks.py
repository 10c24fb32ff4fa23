"""Benchmarks during a training change no bit of it, and are those of a later evaluation of its checkpoint."""

from importlib.util import find_spec

import pytest

from tests.harness.byte_tokenizer import save_tokenizer
from tests.harness.pretraining import (
    losses,
    records,
    run_pretrain,
    same_bits,
    saved_state,
    train,
)

pytestmark = pytest.mark.processes

pytest.importorskip("transformers", reason="transformers is not installed")
STEPS = 4
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --mock-data "
    "--max-position-embeddings 96 --tokenizer-type HuggingFaceTokenizer --lr 1e-2 "
    f"--micro-batch-size 1 --global-batch-size 4 --train-iters {STEPS} --eval-iters 0 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --log-interval 1 "
    "--pipeline-model-parallel-size 2"
).split()
TASKS = ["megatron_ds_opposites", "megatron_ds_sentences"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    save_tokenizer(folder)
    return ["--tokenizer-model", folder]


def test_tasks_change_no_bit_of_a_training_and_an_evaluation_repeats_them(
    tmp_path, words
):
    pytest.importorskip(
        "lm_eval", reason="lm_eval, of the extra eval, is not installed"
    )
    plain = tmp_path / "plain"
    train(2, [*FLAGS, *words, "--save", plain])
    watched = tmp_path / "watched"
    tasks = ["--eval-tasks", ",".join(TASKS), "--eval-tasks-interval", 2]
    limit = ["--eval-tasks-limit", 8]
    train(2, [*FLAGS, *words, "--save", watched, *tasks, *limit])

    assert losses(watched) == losses(plain)
    assert same_bits(saved_state(watched, STEPS), saved_state(plain, STEPS))
    first, last = records(watched, "tasks")
    assert (first["step"], last["step"]) == (2, STEPS)
    assert first["megatron_ds_sentences word_perplexity"] > 0
    assert 0 <= last["megatron_ds_opposites acc"] <= 1
    assert (
        first["megatron_ds_sentences bits_per_byte"]
        != last["megatron_ds_sentences bits_per_byte"]
    )


@pytest.mark.quick
@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_tasks_without_their_package_are_an_error_before_training(words):
    (ended,) = run_pretrain(
        1, [*FLAGS[:-2], *words, "--eval-tasks", "megatron_ds_opposites"]
    )
    assert ended.code == 2 and 'python -m pip install "megatron_ds[eval]"' in ended.err


@pytest.mark.quick
def test_options_of_tasks_need_tasks(words):
    (ended,) = run_pretrain(1, [*FLAGS[:-2], *words, "--eval-tasks-interval", 2])
    assert ended.code == 2 and "no effect without --eval-tasks" in ended.err
