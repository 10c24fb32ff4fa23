"""Ranks with different copies of their data: all end with the same error before they train, which names the place."""

import os
import re
import shutil
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ds.config.parse import read
from megatron_ds.data.text.indexed import IndexedWriter
from megatron_ds.data.text.mask_file import MaskWriter
from megatron_ds.errors import MegatronDSError
from megatron_ds.extensions.guards.second_reading import partners_of
from megatron_ds.training import file_copies
from megatron_ds.training.data_facts import require_same_data
from megatron_ds.training.file_copies import BLOCK_BYTES, spread_blocks
from megatron_ds.training.loaders import Loaders
from tests.harness.pretraining import TINY, run_pretrain
from tests.harness.spoilers import in_a_folder_of_its_own
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads
IDENTITY = {"tokenizer": {"fingerprint": "a"}, "data": {}}
LENGTHS = (5, 9, 31)


def corpus(prefix, lengths=LENGTHS, first_id=0):
    """A corpus with masks, of which every third token is learned."""
    prefix.parent.mkdir(exist_ok=True)
    with IndexedWriter(prefix, np.uint16) as writer, MaskWriter(prefix) as masks:
        for length in lengths:
            ids = (first_id + np.arange(length)) % 60
            writer.add_document(ids)
            masks.add((ids % 3 == 0).astype(np.uint8))
    return prefix


def copied(prefix, folder):
    """A copy of a corpus in another folder."""
    shutil.copytree(prefix.parent, folder)
    return folder / prefix.name


def changed(path, first, content):
    """Overwrite bytes of a file."""
    with path.open("r+b") as file:
        file.seek(first)
        file.write(content)


def errors_of(*paths, options=(), identities=None, ends=None, samples=None):
    """The text of the error of each rank, or None. paths: the words after --data-path of each rank.

    identities, ends, samples: of ranks with another identity, another token at the end of a document, or other
    samples
    """

    def run(rank, world):
        group = world.group("world", range(len(paths)), rank)
        words = [paths[rank]] if isinstance(paths[rank], os.PathLike) else paths[rank]
        config = read([*TINY, *options, "--data-path", *map(str, words)])
        try:
            identity = (identities or {}).get(rank, IDENTITY)
            tokenizer = SimpleNamespace(eod=(ends or {}).get(rank, 60))
            tokens = (samples or {}).get(rank, range(200))
            dataset = [{"tokens": np.array([token])} for token in tokens]
            loaders = Loaders(SimpleNamespace(dataset=dataset))
            require_same_data(config, identity, tokenizer, loaders, group)
        except MegatronDSError as error:
            assert error.on_all_ranks
            return str(error)

    return run_ranks(len(paths), run)


def test_copies_of_a_corpus_may_be_at_other_paths(tmp_path):
    one = corpus(tmp_path / "node1" / "text")
    assert errors_of(one, copied(one, tmp_path / "node2")) == [None, None]


@pytest.mark.parametrize("at", [0, 1, 44, 89])
def test_one_byte_of_the_tokens_is_named(tmp_path, at):
    one = corpus(tmp_path / "node1" / "text")
    other = copied(one, tmp_path / "node2")
    changed(other.with_suffix(".bin"), at, b"\x3b")
    texts = errors_of(one, other, one)
    assert len(set(texts)) == 1
    assert re.search(
        r"the tokens of corpus 1 \(data\), bytes 0 to 89 is hash \S+ on rank 0 on \S+ "
        rf"\(from {one}.bin\), and hash \S+ on rank 1 on \S+ \(from {other}.bin\)",
        texts[0],
    )


def test_sizes_come_before_contents(tmp_path):
    one = corpus(tmp_path / "node1" / "text")
    other = corpus(tmp_path / "node2" / "text", (5, 9, 30))
    assert re.search(
        r"data: corpus 1 \(data\) is 3 documents, 45 tokens on rank 0 on \S+ "
        rf"\(from {one}\), and 3 documents, 44 tokens on rank 1",
        errors_of(one, other)[0],
    )


def test_other_documents_of_the_same_tokens_are_named(tmp_path):
    one = corpus(tmp_path / "node1" / "text", (5, 9, 31))
    other = corpus(tmp_path / "node2" / "text", (9, 5, 31))
    shutil.copy(one.with_suffix(".bin"), other.with_suffix(".bin"))
    assert "the index of corpus 1 (data), bytes 0 to" in errors_of(one, other)[0]


def test_masks_are_compared_where_they_are_read(tmp_path):
    one = corpus(tmp_path / "node1" / "text")
    other = copied(one, tmp_path / "node2")
    masks = other.with_suffix(".mask.bin")
    masks.write_bytes(bytes(1 - byte for byte in masks.read_bytes()))
    assert errors_of(one, other) == [None, None]
    for option in ("--sft", "--dpo"):
        text = errors_of(one, other, options=[option])[0]
        assert "the loss masks of corpus 1 (data), bytes 0 to 44 is hash" in text


def test_each_corpus_of_a_blend_is_compared(tmp_path):
    one = corpus(tmp_path / "node1" / "text")
    other = copied(one, tmp_path / "node2")
    changed(other.with_suffix(".bin"), 7, b"\x3b")
    text = errors_of(["0.5", one, "0.5", one], ["0.5", one, "0.5", other])[0]
    assert "corpus 2 (data)" in text and "corpus 1 (data)" not in text
    text = errors_of(["0.3", one, "0.7", one], ["0.4", one, "0.6", one])[0]
    assert "the blend (data) is" in text


def test_tokenizers_are_compared(tmp_path):
    one = corpus(tmp_path / "node1" / "text")
    other = {"tokenizer": {"fingerprint": "b"}, "data": {}}
    text = errors_of(one, one, identities={1: other})[0]
    assert "the tokenizer is a on rank 0" in text and "b on rank 1" in text
    text = errors_of(one, one, ends={1: 59})[0]
    assert "the id of the end of a document is 60 on rank 0" in text


def test_samples_in_another_order_are_named(tmp_path):
    """Index maps in the cache of one host may have another order."""
    one = corpus(tmp_path / "node1" / "text")
    text = errors_of(one, one, samples={1: range(199, -1, -1)})[0]
    assert "64 samples of the train data, evenly spaced is hash" in text
    assert errors_of(one, one, samples={0: [], 1: []}) == [None, None]


def test_a_file_that_all_ranks_share_is_not_read(tmp_path, monkeypatch):
    one = corpus(tmp_path / "node1" / "text")
    link = tmp_path / "link"
    link.symlink_to(one.parent)
    monkeypatch.setattr(file_copies, "_hash", lambda place: pytest.fail("read"))
    assert errors_of(one, link / "text") == [None, None]


def test_an_unreadable_copy_is_an_error_of_all_ranks(tmp_path):
    one = corpus(tmp_path / "node1" / "text")
    other = copied(one, tmp_path / "node2")
    other.with_suffix(".mask.bin").unlink()
    texts = errors_of(one, other, options=["--sft"])
    assert texts[0] == texts[1]
    assert (
        "rank 1: " in texts[0] and "text.mask.bin cannot be read: No such" in texts[0]
    )


def test_blocks_of_large_files_are_spread_evenly_with_the_last_one_of_each():
    mebi = BLOCK_BYTES
    assert spread_blocks([3 * mebi, mebi - 1, 0], 4) == [range(3), range(1), range(0)]
    sizes = [1000 * mebi + 1, 10 * mebi, 1]
    chosen = spread_blocks(sizes, 101)
    assert [len(blocks) for blocks in chosen] == [100, 1, 1]
    assert [blocks[-1] for blocks in chosen] == [1000, 9, 0]
    assert set(np.diff(chosen[0])) <= {10, 11} and chosen[0][0] <= 11


# ------------------------------------------------------------------ whole runs
TOKENS = 301_228


def other_between_samples(path):
    """Change all tokens but those of 16 evenly spaced blocks of 4,096 bytes."""
    tokens = np.memmap(path, np.uint16, "r+")
    spaced = np.linspace(0, tokens.nbytes - 4096, 16).astype(np.int64) // 2
    kept = np.zeros(len(tokens), bool)
    for start in spaced:
        kept[start : start + 2049] = True
    tokens[~kept] = (tokens[~kept] + 1) % 60
    tokens.flush()
    assert (~kept).sum() > 0.85 * len(tokens)


def with_a_hole(path):
    """Zeros where an interrupted copy wrote nothing."""
    changed(path, 4100, bytes(35_778))


def inverted(path):
    """Masks of the other tokens."""
    path.write_bytes(bytes(1 - byte for byte in path.read_bytes()))


@pytest.mark.processes
@pytest.mark.parametrize(
    "change, suffix, named",
    [
        (other_between_samples, ".bin", "the tokens of corpus 1 (data), bytes 0 to"),
        (with_a_hole, ".bin", "the tokens of corpus 1 (data), bytes 0 to"),
        (inverted, ".mask.bin", "the loss masks of corpus 1 (data), bytes 0 to"),
    ],
)
def test_no_rank_trains_on_another_copy(tmp_path, change, suffix, named):
    lengths = [TOKENS // 4] * 3 + [TOKENS - TOKENS // 4 * 3]
    one = corpus(tmp_path / "node0" / "text", lengths)
    other = copied(one, tmp_path / "node1")
    change(other.with_suffix(suffix))
    argv = [*TINY, "--train-iters", "3", "--data-path", "text", "--split", "100,0,0"]
    if suffix == ".mask.bin":
        argv.append("--sft")
    ended = run_pretrain(
        2, argv, spoil=partial(in_a_folder_of_its_own, folder=tmp_path)
    )
    assert [rank.code for rank in ended] == [2, 2]
    printed = "".join(rank.out + rank.err for rank in ended)
    assert "the ranks of this job have different data" in printed and named in printed
    assert "iteration" not in printed


def test_a_rank_with_a_rarer_copy_reads_after_one_with_another():
    assert partners_of("AABB") == [2, 3, 0, 1]
    for copies in ("AABB", "ABAB", "AAAAAABC", "ABCDE", "AAB", "ABBBB"):
        partners = partners_of(copies)
        assert sorted(partners) == list(range(len(copies)))
        usual = Counter(copies).most_common(1)[0][0]
        for rank, partner in enumerate(partners):
            # The samples of a rank with a rarer copy are read by one with another copy.
            assert copies[partner] == usual or copies[rank] != copies[partner]
    assert partners_of("AAA") == [0, 1, 2]


LARGE = [
    16,
    4096,
    1 << 20,
    5,
]  # tokens; the third document is between the blocks that are read at the start
LAYOUTS = {
    "dp": [],
    "tp": ["--tensor-model-parallel-size", "2"],
    "pp": ["--pipeline-model-parallel-size", "2"],
}


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_of_large_copies_are_compared_as_they_are_read(tmp_path, layout):
    one = corpus(tmp_path / "node0" / "text", LARGE)
    other = copied(one, tmp_path / "node1")
    argv = [*TINY, *LAYOUTS[layout], "--data-path", "text", "--split", "100,0,0"]
    argv += [
        "--train-iters",
        "40",
        "--save",
        tmp_path / "save",
        "--save-interval",
        "20",
    ]
    spoil = partial(in_a_folder_of_its_own, folder=tmp_path, read_bytes=BLOCK_BYTES)
    # Equal copies train to the end.
    ended = run_pretrain(2, argv, spoil=spoil)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    # Of the other one every token of the first half is changed, of which no block was read.
    tokens = np.memmap(other.with_suffix(".bin"), np.uint16, "r+")
    tokens[: len(tokens) // 4] = 59
    tokens.flush()
    shutil.rmtree(tmp_path / "save")
    ended = run_pretrain(2, argv, spoil=spoil)
    printed = "".join(rank.out + rank.err for rank in ended)
    assert [rank.code for rank in ended] == [2, 2], printed
    assert re.search(
        r"the ranks of this job read different data: sample \d+ of the train data, from text.bin at position \d+ of "
        r"the run, is hash \S+ on rank 0 on \S+, and hash \S+ on rank 1 on",
        printed,
    )
    assert not any((tmp_path / "save").glob("iter_*"))
