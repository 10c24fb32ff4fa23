"""Difficulty of samples, mapped and reduced: the numbers of Megatron-DeepSpeed, and safe to repeat after
anything."""

import json
import math
import os
import signal
import subprocess

import numpy as np
import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.config.training_schedule import make_batch_size
from megatron_ds.data.loading.datasets import build_datasets
from megatron_ds.data.text.indexed import IndexedWriter
from megatron_ds.data.tokenizers import build_tokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.bert.data import BERT_DATA
from megatron_ds.extensions.data_efficiency.analyze_data import main
from megatron_ds.extensions.data_efficiency.difficulty_analysis import (
    map_shard,
    percentiles,
    reduce_metric,
)
from megatron_ds.extensions.data_efficiency.difficulty_metrics import (
    ListFile,
    MetricSpec,
    parse_metric,
)
from megatron_ds.extensions.data_efficiency.sample_order import make_order
from tests.harness.documents import ROOT
from tests.harness.sentences import write_sentences
from tests.harness.warm import warm_python

pytestmark = pytest.mark.plan

VOCAB = 50


class Samples:
    """Random samples of 9 tokens, some of them short, and how often each was asked for."""

    def __init__(self, total=100, seed=0):
        draw = np.random.default_rng(seed)
        self.rows = np.minimum(draw.zipf(1.5, (total, 9)), VOCAB) - 1
        self.rows[::7, 5:] = -1
        self.asked = np.zeros(total, int)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.asked[i] += 1
        return {"tokens": self.rows[i]}


def spec(name, source=""):
    return MetricSpec(name, source, vocab_size=VOCAB, seq_length=8)


def analyse(samples, save, *names, shards=3):
    dataset_id = {"samples": len(samples)}
    for name in names:
        for shard in range(shards):
            map_shard(samples, save, shard, shards, [spec(name)], dataset_id)
        reduce_metric(save, spec(name), shards, dataset_id)
    kind = "metric_value" if "freq" in names[-1] else "sample_to_metric"
    return ListFile(save / names[-1] / f"{names[-1]}_{kind}").flat


def rarities(samples) -> torch.Tensor:
    """The values that Megatron-DeepSpeed's analyze_data.py computes."""
    real = torch.from_numpy(samples.rows[samples.rows >= 0])
    counts = torch.bincount(real, minlength=VOCAB).double()
    counts[counts == 0] = 1
    return -torch.log(counts / sum(counts))


def test_lengths_and_frequencies_are_counts(tmp_path):
    samples = Samples()
    assert analyse(samples, tmp_path, "seqlen").tolist() == [
        5 if i % 7 == 0 else 9 for i in range(100)
    ]
    assert analyse(samples, tmp_path, "total_vocab_freq").tolist() == [
        int((samples.rows == token).sum()) for token in range(VOCAB)
    ]


def test_rarity_is_the_sum_of_what_each_token_tells(tmp_path):
    samples, table = Samples(), rarities(Samples())
    rarity = [int(sum(table[t] for t in row if t >= 0)) for row in samples.rows]
    assert (
        analyse(samples, tmp_path, "total_vocab_freq", "vocab_rarity").tolist()
        == rarity
    )
    factor = 10 ** (math.ceil(math.log(8 * table.max().item(), 10)) + 1)
    both = [(5 if i % 7 == 0 else 9) * factor + r for i, r in enumerate(rarity)]
    assert (
        analyse(samples, tmp_path, "total_vocab_freq", "seqlen_vocab_rarity").tolist()
        == both
    )


def test_bert_samples_count_what_is_not_padding(tmp_path):
    class Sentences(Samples):
        def __getitem__(self, i):
            return {
                "text": np.maximum(self.rows[i], 0),
                "padding_mask": (self.rows[i] >= 0).astype(np.int64),
            }

    samples = Sentences()
    assert analyse(samples, tmp_path, "seqlen").tolist() == [
        5 if i % 7 == 0 else 9 for i in range(100)
    ]
    assert (
        analyse(samples, tmp_path, "total_vocab_freq")[0] == (samples.rows == 0).sum()
    )


@pytest.mark.parametrize("shards", [1, 2, 7, 12])
def test_the_number_of_shards_does_not_matter(tmp_path, shards):
    one = analyse(Samples(9), tmp_path / "one", "total_vocab_freq", "vocab_rarity")
    assert (
        analyse(
            Samples(9),
            tmp_path / "many",
            "total_vocab_freq",
            "vocab_rarity",
            shards=shards,
        ).tolist()
        == one.tolist()
    )


def test_what_is_complete_is_not_done_again_and_what_changed_is(tmp_path):
    samples = Samples()
    analyse(samples, tmp_path, "seqlen")
    analyse(samples, tmp_path, "seqlen")
    assert set(samples.asked) == {1}
    (tmp_path / "seqlen" / "worker1_thread0" / "done.json").unlink()
    analyse(samples, tmp_path, "seqlen")
    assert samples.asked.tolist() == [1] * 33 + [2] * 33 + [1] * 34
    other = Samples(seed=1)
    analyse(samples, tmp_path, "total_vocab_freq", "vocab_rarity")
    analyse(other, tmp_path / "other", "total_vocab_freq")
    before = samples.asked.copy()
    # rarities are of other frequencies
    for path in (tmp_path / "other" / "total_vocab_freq").glob("*_metric_value.*"):
        path.replace(tmp_path / "total_vocab_freq" / path.name)
    map_shard(samples, tmp_path, 0, 3, [spec("vocab_rarity")], {"samples": 100})
    assert (samples.asked - before).tolist() == [1] * 33 + [0] * 67


def test_a_reduction_wants_every_shard(tmp_path):
    samples, dataset_id = Samples(), {"samples": 100}
    for shard in (0, 2):
        map_shard(samples, tmp_path, shard, 4, [spec("seqlen")], dataset_id)
    with pytest.raises(
        DataError,
        match="2 of 4 shards are not complete, or were made from other data: 1, 3. Run",
    ):
        reduce_metric(tmp_path, spec("seqlen"), 4, dataset_id)
    with pytest.raises(
        DataError, match="2 of 2 shards"
    ):  # those of four are not those of two
        reduce_metric(tmp_path, spec("seqlen"), 2, dataset_id)


def ratio(samples):
    return samples["tokens"].mean(1)


def transposed(samples):
    return samples["tokens"].sum(0)


def fails(samples):
    raise ValueError("no such thing")


def largest(samples):
    return samples["tokens"].max(1)


@pytest.mark.parametrize(
    "function, said",
    [
        ("ratio", r"gave float64 \[33\] for 33 samples.*Round them"),
        ("transposed", r"gave int64 \[9\] for 33 samples"),
        ("fails", "failed on samples 0 to 32: ValueError: no such thing"),
    ],
)
def test_a_function_that_is_no_metric_is_named(tmp_path, function, said):
    with pytest.raises(DataError, match=f"metric mine {said}"):
        map_shard(
            Samples(),
            tmp_path,
            0,
            3,
            [spec("mine", f"{__name__}:{function}")],
            {"samples": 100},
        )
    assert not list(tmp_path.rglob("*.idx")) and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    "word, said",
    [
        ("vocab_rarety", "did you mean 'vocab_rarity'"),
        ("seqlen=a.b:c", "with a name that is not one of"),
        (
            "a/b=tests.data_efficiency.test_analysis:largest",
            "letters, digits and underscores",
        ),
        ("mine=nowhere:f", "cannot be imported"),
        ("mine=", "give a function as"),
    ],
)
def test_a_metric_that_nobody_knows_is_a_config_error(word, said):
    with pytest.raises(ConfigError, match=said):
        parse_metric(word, VOCAB, 8)


def test_percentiles_are_values_that_so_many_samples_do_not_exceed():
    assert (
        percentiles(np.arange(1, 101)[::-1])
        == "5 % 5 | 25 % 25 | 50 % 50 | 75 % 75 | 95 % 95 | 100 % 100"
    )


# ------------------------------------------------------------------ the tool
@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Flags of a corpus of 60 documents."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(5)
    with IndexedWriter("text_document", np.uint16) as writer:
        for length in draw.integers(3, 60, size=60):
            writer.add_document(np.minimum(draw.zipf(1.5, length), VOCAB) - 1)
    return (
        "--data-path text_document --split 90,10,0 --seq-length 8 --tokenizer-type NullTokenizer "
        f"--vocab-size {VOCAB - 1}"
    ).split()


def run(*words) -> int:
    return main([str(word) for word in words])


def contents(folder) -> dict:
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.suffix in (".bin", ".idx") and path.parent.parent == folder
    }


def test_the_tool_takes_the_flags_of_the_training_and_the_tasks_of_a_cluster_do_the_same(
    tmp_path, corpus, monkeypatch
):
    own = "--metrics vocab_rarity mine=tests.data_efficiency.test_analysis:largest --num-shards 3".split()
    training = [*corpus, *"--num-layers 2 --lr 1e-3 --train-iters 5 --seed 7".split()]
    assert run(*own, "--output", "whole", *training) == 0
    for metrics in (["--metrics", "total_vocab_freq"], own[:3]):
        for shard in (2, 0, 1):
            monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(shard))
            assert (
                run(
                    *metrics,
                    "--num-shards",
                    "3",
                    "--task",
                    "map",
                    "--output",
                    "parts",
                    *training,
                )
                == 0
            )
        assert (
            run(
                *metrics,
                "--num-shards",
                "3",
                "--task",
                "reduce",
                "--output",
                "parts",
                *training,
            )
            == 0
        )
    whole = contents(tmp_path / "whole")
    assert contents(tmp_path / "parts") == whole and len(whole) == 2 + 8 + 8
    described = json.loads((tmp_path / "parts" / "mine" / "analysis.json").read_text())
    assert described["dataset"]["seed"] == 7 and described["dataset"]["seq_length"] == 8


@pytest.mark.parametrize(
    "words, said",
    [
        (["--num-shards", "0"], "use a positive number"),
        (["--shard-index", "3", "--task", "map"], "shards are 0 to 2"),
        (["--shard-index", "1"], "Use --task map"),
        (["--seq-lenght", "8"], "did you mean '--seq-length'"),
        (
            ["--task", "map", "--metrics", "vocab_rarity"],
            "vocab_rarity is computed from it",
        ),
        (["--data-path", "elsewhere"], "elsewhere.idx does not exist"),
        (["--mock-data"], "missing: the data to analyse"),
    ],
)
def test_the_tool_says_what_is_wrong(corpus, capfd, words, said):
    assert (
        run(
            "--metrics",
            "seqlen",
            "--num-shards",
            "3",
            "--output",
            "out",
            *corpus,
            *words,
        )
        == 2
    )
    assert said in capfd.readouterr().err


def test_corpora_may_be_named_in_a_file_but_without_weights(tmp_path, corpus, capfd):
    (tmp_path / "words").write_text("text_document\n")
    (tmp_path / "weights").write_text("0.5 text_document 0.5 text_document")
    own = "--metrics mine=tests.data_efficiency.test_analysis:largest --num-shards 1 --output".split()
    assert run(*own, "named", *corpus) == 0
    written = (tmp_path / "named" / "mine" / "analysis.json").stat().st_mtime_ns
    assert run(*own, "named", "--data-args-path", "words", *corpus[2:]) == 0
    # the same data: nothing to do
    assert (tmp_path / "named" / "mine" / "analysis.json").stat().st_mtime_ns == written
    assert run(*own, "weighted", "--data-args-path", "weights", *corpus[2:]) == 2
    assert "Name the corpora without weights" in capfd.readouterr().err


def with_metric(folder, name, **more) -> list[str]:
    """Flags of a curriculum by the files of an analysis: two tenths of the samples at first, all of them from
    step 9 on."""
    return [
        "--curriculum-metrics",
        json.dumps(
            {
                "name": name,
                "index_to_sample_path": f"{folder}/{name}/{name}_index_to_sample",
                "difficulty_type": "percentile",
                "min_difficulty": 1,
                "max_difficulty": 10,
                "schedule_type": "fixed_linear",
                "clustering_type": "schedule_based",
                "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 1},
            }
        ),
    ]


SIZES = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --lr 1e-3 --train-samples 300 "
    "--micro-batch-size 1 --global-batch-size 10"
).split()


def test_a_batch_rounded_down_for_the_ranks_at_hand_leaves_the_samples_as_they_are(
    tmp_path, corpus
):
    assert (
        run(
            "--metrics",
            "mine=tests.data_efficiency.test_analysis:largest",
            "--output",
            "out",
            *corpus,
        )
        == 0
    )
    total = json.loads((tmp_path / "out" / "mine" / "analysis.json").read_text())[
        "dataset"
    ]["samples"]
    job = [
        *corpus,
        *SIZES,
        "--decrease-batch-size-if-needed",
        *with_metric("out", "mine"),
    ]
    configs = [parse(job, world_size=ranks) for ranks in (1, 3, 4)]
    assert [make_batch_size(config).final for config in configs] == [10, 9, 8]
    orders = [make_order(config, total) for config in configs]
    one = orders[0](np.arange(300), total)
    assert orders[0].starts.tolist() == list(range(0, 90, 10)) and len(
        set(one[:10])
    ) <= total // 5 < len(set(one))
    assert all((order(np.arange(300), total) == one).all() for order in orders)


def test_a_corpus_of_sentences_is_analysed_as_a_bert_reads_it(tmp_path, capfd):
    prefix, tokenizer = write_sentences(tmp_path)
    corpus = [
        "--data-path",
        prefix,
        *"--split 80,20,0 --seq-length 24 --tokenizer-type HuggingFaceTokenizer".split(),
        "--tokenizer-model",
        tokenizer,
        "--model",
        "bert",
    ]
    out = tmp_path / "out"
    assert (
        run(
            "--metrics",
            "seqlen",
            "vocab_rarity",
            "--num-shards",
            "3",
            "--output",
            out,
            *corpus,
        )
        == 0
    )
    config = parse([*corpus, *SIZES, *with_metric(out, "vocab_rarity")])
    words = build_tokenizer(config.data, config.model)
    samples = build_datasets(config, (1, 0, 0), words, BERT_DATA, one_epoch=True).train
    # 0: [PAD]
    texts = [
        samples[i]["text"][: 1 + np.flatnonzero(samples[i]["text"] != 0).max()]
        for i in range(len(samples))
    ]
    counts = np.maximum(
        1, np.bincount(np.concatenate(texts), minlength=words.vocab_size)
    )
    rarity = [int(-np.log(counts[text] / counts.sum()).sum()) for text in texts]
    for name, numbers in (("seqlen", list(map(len, texts))), ("vocab_rarity", rarity)):
        assert (
            ListFile(out / name / f"{name}_sample_to_metric").flat.tolist() == numbers
        ), name
    first = make_order(config, len(samples))(np.arange(10), len(samples))
    assert (
        max(rarity[i] for i in first)
        <= sorted(rarity)[2 * (len(samples) // 10) - 1]
        < max(rarity)
    )
    with pytest.raises(DataError, match="pairs True instead of False"):
        make_order(
            parse(
                [
                    *corpus,
                    *SIZES,
                    *with_metric(out, "vocab_rarity"),
                    "--bert-no-binary-head",
                ]
            ),
            len(samples),
        )


KILLER = """
import os, signal

calls = 0

def largest(samples):
    'Ends its process at the third call ever, as a machine that fails would.'
    global calls
    calls += 1
    if calls == 3 and not os.path.exists("was_killed"):
        open("was_killed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return samples["tokens"].max(1)
"""


def test_after_a_kill_the_same_command_ends_with_the_same_files(tmp_path, corpus):
    (tmp_path / "killer.py").write_text(KILLER)
    command = [
        warm_python(),
        str(ROOT / "tools" / "analyze_data.py"),
        *"--metrics mine=killer:largest --num-shards 4".split(),
        *corpus,
    ]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    tries = [
        subprocess.run(
            [*command, "--output", "killed"],
            env=environment,
            capture_output=True,
            text=True,
        )
        for _ in "12"
    ]
    assert [ended.returncode for ended in tries] == [-signal.SIGKILL, 0], tries[
        1
    ].stderr
    assert (
        "shard 0: complete already" in tries[1].stderr
        and "shard 2: mine" in tries[1].stderr
    )
    assert (
        run(
            "--metrics",
            "mine=tests.data_efficiency.test_analysis:largest",
            "--num-shards",
            "1",
            "--output",
            "whole",
            *corpus,
        )
        == 0
    )
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole") != {}
