"""Whether corpora, index maps and samples equal those of megatron-core: a check beside the tests, which do
not need it.

    python benchmarks/equal_to_megatron.py        # needs megatron-core; a minute; exit code 1 if not

Corpora are written by each side and read by the other, of every dtype, with empty documents and documents of
many sentences, and one above 4 GiB, whose zeros are holes in the file. Index maps are built from random
lengths, orders, weights and sentences by both. Samples are compared through each side's own datasets and
blends, caches and splits.
"""

import argparse
import filecmp
import logging
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megatron_ds.config.options.data import DataConfig
from megatron_ds.data.loading import blend, index_maps
from megatron_ds.data.loading.datasets import build_datasets
from megatron_ds.data.text.indexed import DTYPES, IndexedDataset, IndexedWriter
from megatron_ds.extensions.bert import maps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", type=int, default=1000, help="random cases of each kind of index map"
    )
    cases = parser.parse_args().cases
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        check_corpora(Path(folder))
        check_large_corpus(Path(folder))
        check_samples(Path(folder))
    for compiled in (True, False):
        check_index_maps(cases, compiled)


def check_corpora(folder):
    """Random corpora that both write have equal bytes, and each reads the files of the other."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs

    rng = np.random.default_rng(0)
    for case in range(20 * len(DTYPES)):
        dtype = list(DTYPES.values())[case % len(DTYPES)]
        longest = rng.choice([1, 3, 9])
        count = int(rng.integers(1, 30))
        documents = [
            rng.integers(0, longest, int(rng.integers(0, 5))).tolist()
            for _ in range(count)
        ]
        tokens = [
            rng.integers(0, 100, sum(lengths)).astype(dtype) for lengths in documents
        ]
        # Their bytes, and what is read from them.
        ours, theirs = write_both(folder / f"c{case}", dtype, zip(tokens, documents))
        equal_files(ours, theirs)
        # Ours reads theirs, and theirs ours.
        read = IndexedDataset(theirs)
        read.check()
        peer = (
            Theirs(str(ours)) if read.num_tokens else read
        )  # theirs cannot open a corpus without any token
        assert (
            len(read) == len(peer)
            and read.num_documents == len(documents) == len(peer.document_indices) - 1
        )
        assert np.array_equal(read.document_indices, peer.document_indices)
        for i in range(len(read)):
            assert read[i].dtype == peer[i].dtype and np.array_equal(read[i], peer[i])
            start = int(rng.integers(0, len(read[i]) + 1))
            assert np.array_equal(read.get(i, start), peer.get(i, start))
    print(
        f"corpora: {case + 1} written by both, {len(DTYPES)} dtypes: byte-identical, read alike in both "
        "directions"
    )


def check_large_corpus(folder):
    """A corpus of more than 4 GiB, in which zeros take no room."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset as Theirs

    zeros = np.zeros(16 << 20, np.int32)
    last = np.arange(1, 1000, dtype=np.int32)
    documents = [(zeros, [len(zeros)])] * 68 + [(last, [400, 599]), (last[:0], [])]
    ours, theirs = write_both(folder / "large", np.int32, documents, opened=Sparse)
    equal_files(ours, theirs, contents=False)
    # Its size, and what it takes of the disk.
    found = (folder / "large_ours.bin").stat()
    size = found.st_size
    held = found.st_blocks * 512
    read = IndexedDataset(theirs)
    peer = Theirs(str(ours))
    read.check()
    assert (
        size > 4 << 30
        and np.array_equal(read[69], last[400:])
        and np.array_equal(peer[69], last[400:])
    )
    assert np.array_equal(read.get(67, len(zeros) - 3), peer.get(67, len(zeros) - 3))
    print(
        f"large corpus: {size / 2**30:.2f} GiB in {held / 2**20:.1f} MiB of disk, index byte-identical, "
        "its end read alike"
    )


class Sparse:
    """A file in which zeros are left out."""

    def __init__(self, file):
        self._file = file

    def write(self, data):
        """Write bytes; a run of zeros becomes a hole."""
        if data.count(0) == len(data):
            self._file.flush()
            end = os.fstat(self._file.fileno()).st_size + len(data)
            os.ftruncate(
                self._file.fileno(), end
            )  # a hole, also where a file is only appended to
            self._file.seek(end)
        else:
            self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)


def write_both(prefix, dtype, documents, opened=lambda file: file):
    """(our prefix, theirs) of the same documents. opened: file → the file that is written to."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    ours = f"{prefix}_ours"
    theirs = f"{prefix}_theirs"
    # Theirs writes tokens at once and the index at the end, as ours does.
    builder = IndexedDatasetBuilder(f"{theirs}.bin", dtype=dtype)
    builder.data_file = opened(builder.data_file)
    with IndexedWriter(ours, dtype) as writer:
        writer._bin = opened(writer._bin)
        # Each document goes to both.
        for tokens, lengths in documents:
            writer.add_document(tokens, lengths)
            builder.add_document(tokens, lengths)
    builder.finalize(f"{theirs}.idx")
    return ours, theirs


def equal_files(ours, theirs, contents=True):
    """Raises if two corpora differ in their index, size or, with `contents`, tokens."""
    assert filecmp.cmp(f"{ours}.idx", f"{theirs}.idx", shallow=False), (
        f"{ours}.idx differs"
    )
    assert os.path.getsize(f"{ours}.bin") == os.path.getsize(f"{theirs}.bin")
    assert not contents or filecmp.cmp(f"{ours}.bin", f"{theirs}.bin", shallow=False), (
        f"{ours}.bin differs"
    )


def check_samples(folder):
    """Samples of one corpus and of blends are equal."""
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
    )
    # Three corpora of different sizes.
    rng = np.random.default_rng(1)
    prefixes = []
    for name, documents in (("web", 400), ("books", 90), ("code", 40)):
        prefixes.append(str(folder / name))
        with IndexedWriter(prefixes[-1], np.uint16) as writer:
            for length in rng.integers(1, 60, documents):
                writer.add_document(rng.integers(1, 5000, length))
    compared = 0
    blends = (
        (prefixes[:1], None),
        (prefixes[:1], [0.5]),
        (prefixes, [0.6, 0.3, 0.1]),
        (prefixes, [1.0, 1.0, 1.0]),
        (prefixes, None),
    )
    # Each blend with two lengths of samples.
    for words, weights in blends:
        for seq_length, wanted in ((16, (700, 60, 20)), (7, (150, 8, 8))):
            mine = ours_of(folder, words, weights, seq_length, wanted)
            peers = theirs_of(folder, words, weights, seq_length, wanted)
            for one, two in zip(mine, peers):
                # Theirs rounds the samples of each corpus up; without weights it lists every sample, whatever
                # is wanted.
                assert (
                    len(one) == len(two)
                    if len(words) == 1 and weights is None
                    else len(one) <= len(two)
                )
                for i in range(len(one)):
                    tokens = one[i]["tokens"]
                    assert np.array_equal(
                        tokens[:-1], two[i]["tokens"]
                    ) and np.array_equal(tokens[1:], two[i]["labels"])
                compared += len(one)
    print(
        f"samples: {compared} of train, valid and test, one corpus and blends with and without weights: "
        "equal"
    )


def ours_of(folder, prefixes, weights, seq_length, wanted):
    """Our datasets of train, valid and test. wanted: samples of each."""
    words = (
        prefixes
        if weights is None
        else [str(word) for pair in zip(weights, prefixes) for word in pair]
    )
    data = DataConfig(
        data_path=tuple(words),
        split="90,7,3",
        data_cache_path=str(folder / "ours"),
        dataloader_type="cyclic",
    )
    config = SimpleNamespace(
        data=data,
        model=SimpleNamespace(seq_length=seq_length),
        train=SimpleNamespace(seed=1234),
    )
    return build_datasets(config, wanted, SimpleNamespace(vocab_size=5000))


def theirs_of(folder, prefixes, weights, seq_length, wanted):
    """Megatron's datasets of train, valid and test."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer = SimpleNamespace(
        eod=0, pad=-1, vocab_size=5000, unique_identifiers={"name": "made up"}
    )
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=(prefixes, weights),
        split="90,7,3",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(folder / "theirs"),
        mid_level_dataset_surplus=0.005,
    )
    sizes = [None] * 3 if weights is None and len(prefixes) > 1 else wanted
    return BlendedMegatronDatasetBuilder(
        GPTDataset, sizes, lambda: True, config
    ).build()


def check_index_maps(cases, compiled):
    """Compare index maps. compiled: those of the compiled builder, else those of numpy and Python."""
    import megatron.core.datasets.helpers_cpp as peer

    rng = np.random.default_rng(compiled)
    extension = index_maps.extension
    for module in (index_maps, blend, maps):
        module.extension = extension if compiled else lambda: None
    for _ in range(cases):
        check_sample_index(rng, peer)
        check_blends(rng, peer)
        check_sentences(rng, peer)
    print(
        f"index maps of {'the compiled builder' if compiled else 'numpy'}: {cases} random cases each of "
        "sample index, blend, exhaustive blend, BERT mapping, block mapping: equal"
    )


def check_sample_index(rng, peer):
    """One random case of the first token of each sample."""
    lengths = rng.integers(0, rng.choice([2, 9, 300]), int(rng.integers(1, 60))).astype(
        np.int32
    )
    # At least one sample.
    lengths[rng.integers(len(lengths))] += 2
    epochs = int(rng.integers(1, 4))
    seq_length = int(rng.integers(2, 80))
    order = rng.permutation(np.tile(np.arange(len(lengths), dtype=np.int32), epochs))
    tokens = int(lengths.sum())
    for build, dtype in (
        (peer.build_sample_idx_int32, np.int32),
        (peer.build_sample_idx_int64, np.int64),
    ):
        theirs = build(lengths, order, seq_length, epochs, tokens, True, 1)
        assert np.array_equal(
            index_maps.build_sample_index(
                lengths, order, seq_length, epochs * tokens
            ).astype(dtype),
            theirs,
        )


def check_blends(rng, peer):
    """One random case of blends by weight, and of all samples."""
    count = int(rng.integers(1, 40))
    size = int(rng.integers(0, 400))
    weights = rng.choice(
        [
            rng.random(count) + 1e-6,
            np.exp(rng.normal(0, 3, count)),
            rng.integers(1, 4, count).astype(float),
        ]
    )
    shares = weights / weights.sum()
    which = np.zeros(size, np.int16)
    sample = np.zeros(size, np.int64)
    peer.build_blending_indices(which, sample, shares, count, size, False)
    assert all(map(same, blend.build_blend_index(shares, size), (which, sample)))
    sizes = rng.integers(1, 30, count).astype(
        np.int64
    )  # theirs writes outside its arrays when a size is 0
    which = np.zeros(sizes.sum(), np.int16)
    sample = np.zeros(sizes.sum(), np.int64)
    peer.build_exhaustive_blending_indices(which, sample, sizes, count)
    assert all(map(same, blend.build_exhaustive_index(sizes), (which, sample)))


def check_sentences(rng, peer):
    """One random case of BERT's samples."""
    # Documents of sentences, some of them empty.
    bounds = np.r_[
        0, np.cumsum(rng.integers(0, rng.integers(2, 12), int(rng.integers(0, 40))))
    ].astype(np.int64)
    sizes = rng.integers(0, rng.choice([5, 40, 520]), int(bounds[-1]) + 2).astype(
        np.int32
    )
    bounds = bounds[int(rng.integers(0, len(bounds))) :]
    titles = rng.integers(0, 20, len(bounds) - 1).astype(np.int32)
    epochs = int(rng.integers(1, 5))
    most = int(rng.choice([1, 5, 50, 2**62]))
    longest = int(rng.integers(2, 200))
    seed = int(rng.integers(1, 2**31 - 1))
    short = float(rng.choice([0, 0.1, 0.4, 1, 0.03]))
    least = int(rng.integers(1, 4))
    one = bool(rng.integers(0, 2))
    limits = dict(
        num_epochs=epochs, max_num_samples=most, max_seq_length=longest, seed=seed
    )
    assert same(
        maps.build_mapping(
            bounds, sizes, **limits, short_seq_prob=short, min_num_sent=least
        ),
        peer.build_mapping(
            bounds, sizes, epochs, most, longest, short, seed, False, least
        ),
    )
    assert same(
        maps.build_blocks_mapping(
            bounds, sizes, titles, **limits, use_one_sent_blocks=one
        ),
        peer.build_blocks_mapping(
            bounds, sizes, titles, epochs, most, longest, seed, False, one
        ),
    )


def same(one, two):
    return (
        one.dtype == two.dtype and one.shape == two.shape and np.array_equal(one, two)
    )


if __name__ == "__main__":
    main()
