"""What a user did wrong: one paragraph that says what to do, exit code 2, told once, nothing left behind.

The words of the configuration's own messages are in tests/golden/config_messages.txt; here are the errors
that only show when files are opened and ranks have met, seen from the entry script on real processes.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.text.indexed import IndexedWriter
from tests.harness.limits import HUNG
from tests.harness.pretraining import MOCK, TINY, VOCAB, run_pretrain, train
from tests.harness.warm import warm_python

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TP2, PP2 = (
    ["--tensor-model-parallel-size", "2"],
    ["--pipeline-model-parallel-size", "2"],
)
STEPS = ["--train-iters", "3", "--eval-iters", "1"]


def write_corpus(prefix: Path, documents: int, vocab: int = VOCAB) -> None:
    numbers = np.random.default_rng(documents)
    with IndexedWriter(prefix, np.uint16) as corpus:
        for _ in range(documents):
            corpus.add_document(
                [*numbers.integers(0, vocab, numbers.integers(5, 40)).tolist(), vocab]
            )


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """good, few (2 documents), wide (ids beyond the vocabulary), none (no document), and damaged copies of
    good."""
    folder = tmp_path_factory.mktemp("corpora")
    write_corpus(folder / "good", 60)
    write_corpus(folder / "few", 2)
    write_corpus(folder / "wide", 60, vocab=5 * VOCAB)
    write_corpus(folder / "none", 0)
    index, tokens = (
        (folder / "good.idx").read_bytes(),
        (folder / "good.bin").read_bytes(),
    )
    flipped = bytearray(index)
    flipped[34 + 4 * 20 : 34 + 4 * 20 + 2] = b"\xff\xff"
    damaged = {
        "no-bin": (index, None),
        "no-idx": (None, tokens),
        "short-bin": (index, tokens[:-6]),
        "long-bin": (index, tokens + b"xx"),
        "empty-bin": (index, b""),
        "short-idx": (index[:-6], tokens),
        "empty-idx": (b"", tokens),
        "text": (b"x" * 99, tokens),
        "flipped": (bytes(flipped), tokens),
    }
    for name, contents in damaged.items():
        for suffix, data in zip((".idx", ".bin"), contents):
            if data is not None:
                (folder / f"{name}{suffix}").write_bytes(data)
    return folder


def files_in(folder: Path) -> set[str]:
    return {
        str(p.relative_to(folder)) for p in folder.rglob("*") if "cache" not in p.parts
    }


def told(argv, ranks: int = 1, spoil=None) -> str:
    """The error, having checked that all ranks end with code 2, without a traceback, and that rank 0 alone
    tells it."""
    ended = run_pretrain(ranks, argv, spoil=spoil)
    assert [e.code for e in ended] == [2] * ranks, ended
    assert ended[0].err.startswith("error: ") and [e.err for e in ended[1:]] == [""] * (
        ranks - 1
    ), ended
    assert (
        "Traceback" not in ended[0].out + ended[0].err
        and "iteration" not in ended[0].out
    )
    return ended[0].err


# ---------------------------------------------------------------------- data
@pytest.mark.parametrize(
    "corpus, words",
    [
        (
            "god",
            r"--data-path .*/god: .*god\.idx does not exist\. .* prefix .* there is good\.",
        ),
        ("no-idx", r"no-idx\.idx does not exist"),
        ("no-bin", r"no-bin\.bin does not exist"),
        (
            "short-bin",
            r"short-bin\.bin is damaged: it is truncated: \d+ bytes where .* describes \d+",
        ),
        ("long-bin", "too long"),
        ("empty-bin", "truncated: 0 bytes"),
        ("short-idx", r"short-idx\.idx is damaged: it is truncated"),
        ("empty-idx", "fewer than its header of 34"),
        ("text", r"it begins with b'xxxxxxxxx'.*: not an index of this format\. Copy"),
        ("flipped", "sequence 21 .* does not continue the sequence before it"),
        ("none", "the corpus is empty"),
        (
            "few",
            r"the valid part is empty: --split 80,10,10 divides the 2 documents into train 2, valid 0, test "
            r"0",
        ),
        (
            "wide",
            f"it holds token id .* NullTokenizer as given has a vocabulary of {VOCAB + 1}: .* another tokenizer",
        ),
    ],
)
def test_a_corpus_that_will_not_do_is_named_with_its_flag_and_defect(
    corpora, corpus, words
):
    before = files_in(corpora)
    assert re.search(
        words,
        told(
            [*TINY, *STEPS, "--split", "80,10,10", "--data-path", str(corpora / corpus)]
        ),
    )
    assert files_in(corpora) == before


def test_a_path_of_each_part_is_named_by_its_own_flag(corpora):
    paths = [
        "--train-data-path",
        str(corpora / "good"),
        "--valid-data-path",
        str(corpora / "short-bin"),
    ]
    assert "--valid-data-path" in told([*TINY, *STEPS, *paths])
    blend = [
        "--data-path",
        "0.3",
        str(corpora / "good"),
        "0.7",
        str(corpora / "nothing"),
        "--split",
        "80,10,10",
    ]
    assert f"--data-path {corpora / 'nothing'}: " in told([*TINY, *STEPS, *blend])


@pytest.mark.parametrize(
    "tokenizer, words",
    [
        (["GPT2BPETokenizer"], "needs --vocab-file and --merge-file"),
        (
            ["GPT2BPETokenizer", "--vocab-file", "/no/v", "--merge-file", "/no/m"],
            "--vocab-file /no/v: .* no such.*--merge-file ",
        ),
        (
            ["HuggingFaceTokenizer", "--tokenizer-model", "/nowhere"],
            "--tokenizer-model /nowhere: there is no such file or folder",
        ),
        (["SentencePieceTokenizer"], "needs --tokenizer-model"),
        (
            ["GPTBPETokenizer"],
            r"unknown tokenizer 'GPTBPETokenizer'; did you mean 'GPT2BPETokenizer'\? Known: ",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_told_with_its_flags(
    corpora, tokenizer, words
):
    job = (
        TINY[: TINY.index("--tokenizer-type")]
        + TINY[TINY.index("--tokenizer-type") + 2 :]
    )
    assert re.search(
        words,
        told(
            [
                *job,
                *STEPS,
                "--data-path",
                str(corpora / "good"),
                "--tokenizer-type",
                *tokenizer,
            ]
        ),
    )


# ---------------------------------------------------------------------- places to write
@pytest.mark.parametrize(
    "flag, inside, words",
    [
        (
            "--save",
            "file/checkpoints",
            "--save .*: no checkpoint can be written there .* would lose its work at the first save",
        ),
        ("--save", "file", "--save .*: no checkpoint can be written there"),
        (
            "--tensorboard-dir",
            "file/events",
            "--tensorboard-dir: nothing can be written in",
        ),
        (
            "--metrics-path",
            "file/metrics.jsonl",
            r"--metrics-path: nothing can be written in .*file \(it is a file\)",
        ),
        ("--metrics-path", ".", "is not a file. Give a file, such as"),
        (
            "--metrics-path",
            "file",
            "does not hold metrics, so no records can be appended to it",
        ),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_where_nothing_can_be_written_is_found_before_the_first_step(
    tmp_path, flag, inside, words, ranks
):
    (tmp_path / "file").write_text("precious\n")
    assert re.search(words, told([*MOCK, flag, str(tmp_path / inside)], ranks))
    assert (
        files_in(tmp_path) == {"file"}
        and (tmp_path / "file").read_text() == "precious\n"
    )


def test_indices_that_cannot_be_kept_are_warned_of_once(corpora, tmp_path):
    (tmp_path / "file").write_text("")
    flags = [
        "--data-path",
        str(corpora / "good"),
        "--split",
        "80,10,10",
        "--data-cache-path",
        str(tmp_path / "file"),
    ]
    assert train(1, [*TINY, *STEPS, *flags])[0].out.count("--data-cache-path.") == 1


# ---------------------------------------------------------------------- checkpoints
@pytest.fixture(scope="module")
def checkpoint(corpora, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "saved"
    train(
        1,
        [
            *TINY,
            *STEPS,
            "--data-path",
            str(corpora / "good"),
            "--split",
            "80,10,10",
            "--save",
            str(folder),
        ],
    )
    return folder


def resumed(corpora, checkpoint, *more: str, data: str = "good") -> list[str]:
    path = ["--data-path", str(corpora / data), "--split", "80,10,10"]
    return [
        *TINY,
        *STEPS,
        *path,
        "--load",
        str(checkpoint),
        "--train-iters",
        "4",
        *more,
    ]


@pytest.mark.parametrize(
    "ranks, more, words",
    [
        (1, ["--hidden-size", "64"], "hidden_size: checkpoint 32, this run 64"),
        (2, ["--num-layers", "4"], "num_layers: checkpoint 2, this run 4"),
        (
            1,
            ["--vocab-size", "62"],
            "tokenizer.fingerprint: checkpoint 'NullTokenizer:61', this run 'NullTokenizer:62'",
        ),
        (
            1,
            ["--seed", "5"],
            r"data.seed: checkpoint 1234, this run 5.* Use --finetune to train its weights on other data",
        ),
        (
            2,
            ["--optimizer", "sgd"],
            "holds the state of --optimizer adam.* Use --optimizer adam, or .* --no-load-optim",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_what_to_do(
    corpora, checkpoint, ranks, more, words
):
    message = told(resumed(corpora, checkpoint, *more), ranks)
    assert message.startswith(f"error: --load {checkpoint}") and re.search(
        words, message
    )


def test_other_data_are_refused_and_the_same_data_elsewhere_are_not(
    corpora, checkpoint, tmp_path
):
    write_corpus(corpora / "other", 61)
    message = told(resumed(corpora, checkpoint, data="other"))
    assert re.search(
        r"data_path: checkpoint \['good \(\w+\)'\], this run \['other", message
    )
    for suffix in (".bin", ".idx"):
        shutil.copy(corpora / f"good{suffix}", tmp_path)
    train(1, resumed(tmp_path, checkpoint, "--split", "0.8/0.1/0.1"))


@pytest.mark.parametrize(
    "inside, words",
    [
        ("run.json", "is a file"),
        ("", "is a checkpoint itself: --load takes the directory above"),
    ],
)
def test_load_of_something_else_is_told(corpora, checkpoint, inside, words):
    assert words in told(resumed(corpora, checkpoint / "iter_0000003" / inside))


# ---------------------------------------------------------------------- several ranks
@pytest.mark.quick
@pytest.mark.parametrize(
    "argv, words",
    [
        (
            [*MOCK, "--tensor-model-parallel-size", "3"],
            "world size 2 is not divisible by --tensor-model-parall",
        ),
        (
            [*MOCK, *TP2, "--num-attention-heads", "1"],
            "--num-attention-heads 1 is not a multiple of --tensor-mo",
        ),
        (
            [*TINY, *STEPS, *TP2, "--data-path", "/nowhere/corpus"],
            "/nowhere/corpus.idx does not exist",
        ),
        (
            [*MOCK, *PP2, "--save", "/proc/checkpoints"],
            "--save /proc/checkpoints: no checkpoint can be written",
        ),
    ],
)
def test_ranks_tell_an_error_once(argv, words):
    assert told(argv, ranks=2).count(words) == 1


@contextlib.contextmanager
def elsewhere(rank: int, folders: list[str]):
    """Each rank in a folder of its own, as on machines without a shared disk."""
    before = os.getcwd()
    os.chdir(folders[rank])
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "there, words", [(None, "good.idx does not exist"), ("wide", "another tokenizer")]
)
def test_what_one_rank_lacks_ends_all_of_them_naming_it(
    corpora, tmp_path, there, words
):
    folders = [tmp_path / name for name in ("zero", "one")]
    for folder, corpus in zip(folders, ("good", there)):
        folder.mkdir()
        for suffix in (".bin", ".idx") if corpus else ():
            shutil.copy(corpora / f"{corpus}{suffix}", folder / f"good{suffix}")
    argv = [*TINY, *STEPS, *PP2, "--data-path", "good", "--split", "80,10,10"]
    message = told(
        argv, ranks=2, spoil=partial(elsewhere, folders=list(map(str, folders)))
    )
    assert "rank 1: --data-path good: " in message and words in message


BROKEN_ON_ONE_RANK = """
import os, sys, time
from megatron_ds.training import pretrain, trainer

def broken(step):
    def broken_step(self):
        if self.progress.step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        return step(self)
    return broken_step

trainer.Trainer._step = broken(trainer.Trainer._step)
if "--slow" in sys.argv:
    sys.argv.remove("--slow")
    time.sleep(2.0 * (os.environ["RANK"] == "0"))
sys.exit(pretrain.pretrain())
"""


def torchrun(tmp_path: Path, ranks: int, argv: list[str]) -> str:
    """The stderr of a script that ends badly under torchrun."""
    (tmp_path / "broken.py").write_text(BROKEN_ON_ONE_RANK)
    launcher = [
        warm_python(),
        *f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split(),
    ]
    ended = subprocess.run(
        [*launcher, str(tmp_path / "broken.py"), *argv],
        capture_output=True,
        text=True,
        timeout=HUNG,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            "PYTHON_EXEC": warm_python(),
        },
    )
    assert ended.returncode == 1, ended.stderr
    return ended.stderr


def test_under_torchrun_an_error_is_told_once_even_if_rank_0_is_the_last_to_have_it(
    tmp_path,
):
    said = torchrun(tmp_path, 2, [*MOCK, "--hidden-size", "33", "--slow"])
    assert (
        len(re.findall(r"^error", said, re.MULTILINE)) == 1
        and "\nerror: --hidden-size 33 is not" in "\n" + said
    )
    cause = said[said.index("Root Cause") :]
    assert (
        re.search(r"rank +: 0 ", cause)
        and "error: --hidden-size 33 is not" in cause.splitlines()[-2]
    )


def test_ranks_that_lose_one_say_what_they_waited_for_and_end(tmp_path):
    said = torchrun(tmp_path, 4, [*MOCK, *TP2, *PP2, "--num-workers", "0"])
    assert re.search(
        r"^error.* rank \d: .* failed in the \S+ group of ranks \[.*\]\. A peer exited: ",
        said,
        re.MULTILINE,
    )
    cause = said[said.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", cause) and "SIGKILL" in cause


# ---------------------------------------------------------------------- files of settings, end to end
def test_a_deepspeed_json_and_a_yaml_file_drive_a_run(tmp_path):
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "steps_per_print": 1,
                "gradient_clipping": 0.5,
                "fp16": {"enabled": False, "loss_scale": 0},
                "bf16": {"enabled": True},
                "zero_optimization": {
                    "stage": 1,
                    "reduce_bucket_size": 5e5,
                    "overlap_comm": True,
                },
                "optimizer": {
                    "type": "AdamW",
                    "params": {
                        "lr": 2e-3,
                        "betas": [0.9, 0.95],
                        "eps": 1e-8,
                        "weight_decay": "auto",
                    },
                },
                "scheduler": {
                    "type": "WarmupDecayLR",
                    "params": {
                        "warmup_num_steps": 2,
                        "warmup_max_lr": 2e-3,
                        "total_num_steps": 6,
                        "warmup_type": "linear",
                    },
                },
                "tensorboard": {
                    "enabled": True,
                    "output_path": str(tmp_path / "events"),
                    "job_name": "job",
                },
            }
        )
    )
    (tmp_path / "model.yaml").write_text(
        "model:\n  num_layers: 2\n  hidden_size: 32\n  num-attention-heads: 4\n  seq_length: 16\n  "
        "vocab_size: 61\nmock_data: true\ntrain_iters: 3\neval_iters: 0\n"
    )
    argv = [
        "--config",
        str(tmp_path / "model.yaml"),
        "--deepspeed_config",
        str(tmp_path / "ds.json"),
        "--weight-decay",
        "0.2",
        "--save",
        str(tmp_path / "saved"),
    ]
    out = train(2, argv)[0].out
    listed = out.partition("not at their defaults:\n")[2]
    groups = dict(
        re.findall(r"^  (\S+)  +((?:.|\n   )+)", listed, re.MULTILINE)
    )  # source → its values
    for source, value in (
        ("ds.json", "lr 0.002"),
        ("flags", "weight_decay 0.2"),
        ("model.yaml", "num_layers 2"),
        ("ds.json", "zero_stage 1"),
        ("ds.json", "adam_beta2 0.95"),
    ):
        assert value in groups[source], (source, value)
    assert "bfloat16 weights" in out
    rates = re.findall(r"learning rate: (\S+)", out)
    assert list(map(float, rates)) == [0.0, 0.0, 1e-3] and list(
        (tmp_path / "events" / "job").iterdir()
    )


def test_settings_that_disagree_are_told_with_both_places(tmp_path):
    (tmp_path / "ds.json").write_text(
        '{"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "amp": {"enabled": true}}'
    )
    (tmp_path / "run.yaml").write_text("lr: 1e-3\nhiden_size: 3\n")
    job = [word for word in MOCK if word not in ("--lr", "1e-3")]
    message = told(
        [
            *job,
            "--config",
            str(tmp_path / "run.yaml"),
            "--deepspeed-config",
            str(tmp_path / "ds.json"),
        ],
        ranks=2,
    )
    assert (
        "did you mean 'hidden_size'?" in message
        and "amp" in message
        and "bf16" in message
    )
    (tmp_path / "run.yaml").write_text("lr: 1e-3\n")
    (tmp_path / "ds.json").write_text(
        '{"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}}'
    )
    message = told(
        [
            *job,
            "--config",
            str(tmp_path / "run.yaml"),
            "--deepspeed-config",
            str(tmp_path / "ds.json"),
        ]
    )
    assert re.search(
        r"--lr is 0.001 in .*run.yaml:1 but 0.01 in .*ds.json optimizer.params.lr: files do not",
        message,
    )


def test_a_corpus_beside_mock_data_is_named_at_the_end_as_well():
    words = [*MOCK, "--train-iters", "3", "--data-path", "/no/such", "--split", "1,0,0"]
    [ended] = train(1, words)
    last = (ended.out + ended.err).splitlines()[-1]
    assert last == (
        "the data were mock, as --mock-data was given: --data-path /no/such had no effect"
    )
    [ended] = train(1, [*MOCK, "--train-iters", "3"])
    assert "had no effect" not in ended.out + ended.err
