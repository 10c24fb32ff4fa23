"""Samples of a corpus, and the cache of its index maps."""

import multiprocessing
import os
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.samples import gpt_corpus
from megatron_ds.data.samples.gpt_corpus import open_gpt_dataset
from megatron_ds.data.text.indexed import IndexedDataset, IndexedWriter
from megatron_ds.errors import DataError
from tests.harness.limits import HUNG

pytestmark = pytest.mark.plan


def write(prefix, sizes, first=0):
    """Documents of these sizes; token ids count upwards over the whole corpus."""
    with IndexedWriter(prefix, np.int32) as w:
        for size in sizes:
            w.add_document(np.arange(first, first + size))
            first += size
    return IndexedDataset(prefix)


def open_dataset(corpus, samples=None, cache=None, seq_length=4):
    return open_gpt_dataset(
        corpus,
        range(len(corpus)),
        title="GPTDataset-train",
        seq_length=seq_length,
        num_samples=samples,
        seed=1234,
        cache=cache,
    )


def test_samples_are_slices_of_the_shuffled_documents(tmp_path):
    sizes = [5, 3, 8, 1, 10, 4, 2, 17]
    corpus = write(tmp_path / "c", sizes)
    dataset = open_dataset(corpus, samples=29)
    stream = np.concatenate([corpus[d] for d in dataset.maps.document_index.tolist()])
    assert len(dataset) == (3 * 50 - 1) // 4
    for i in range(len(dataset)):
        cut = int(dataset.maps.shuffle_index[i])
        tokens = dataset[i]["tokens"]
        assert (
            tokens.dtype == np.int64
            and tokens.tolist() == stream[cut * 4 : cut * 4 + 5].tolist()
        )


def test_one_epoch_without_shuffling_would_be_the_corpus_and_shuffled_is_a_permutation_of_it(
    tmp_path,
):
    corpus = write(tmp_path / "c", [7] * 9)
    samples = [
        tuple(s["tokens"][:-1].tolist())
        for s in map(open_dataset(corpus).__getitem__, range(15))
    ]
    assert len({t for s in samples for t in s}) == 60  # no token twice
    assert [s[0] for s in samples] != sorted(s[0] for s in samples)


def test_second_opening_maps_the_cache_and_builds_nothing(tmp_path, monkeypatch):
    corpus = write(tmp_path / "c", [5, 3, 8])
    first = open_dataset(corpus, 9)[8]["tokens"]
    names = sorted(os.listdir(tmp_path / "cache" / "GPTDataset_indices"))
    assert [n.split("-", 1)[-1] for n in names if not n.startswith(".")] == [
        "GPTDataset-train-description.txt",
        "GPTDataset-train-document_index.npy",
        "GPTDataset-train-sample_index.npy",
        "GPTDataset-train-shuffle_index.npy",
    ]
    monkeypatch.setattr(gpt_corpus, "build_index_maps", None)
    assert open_dataset(corpus, 9)[8]["tokens"].tolist() == first.tolist()
    with pytest.raises(TypeError):
        open_dataset(corpus, 10)  # another key: has to be built


def test_a_cache_of_another_corpus_under_the_same_name_is_not_used(tmp_path):
    write(tmp_path / "c", [5, 3, 8])
    open_dataset(IndexedDataset(tmp_path / "c"), 3)
    corpus = write(tmp_path / "c", [3, 5, 8], first=100)
    dataset = open_dataset(corpus, 3)
    stream = np.concatenate([corpus[d] for d in dataset.maps.document_index.tolist()])
    cut = int(dataset.maps.shuffle_index[1])
    assert dataset[1]["tokens"].tolist() == stream[cut * 4 : cut * 4 + 5].tolist()


@pytest.mark.parametrize("damage", ["truncate", "empty", "remove"])
def test_a_damaged_cache_is_built_again(tmp_path, damage):
    corpus = write(tmp_path / "c", [5, 3, 8])
    before = open_dataset(corpus, 9, tmp_path / "kept")
    want = [before[i]["tokens"].tolist() for i in range(len(before))]
    file = next((tmp_path / "kept").glob("*sample_index.npy"))
    if damage == "remove":
        file.unlink()
    else:
        os.truncate(file, 0 if damage == "empty" else file.stat().st_size - 8)
    after = open_dataset(corpus, 9, tmp_path / "kept")
    assert [after[i]["tokens"].tolist() for i in range(len(after))] == want
    assert np.load(file).shape == before.maps.sample_index.shape


def test_a_folder_that_cannot_be_written_means_indices_in_memory_and_a_warning(
    tmp_path, caplog
):
    corpus = write(tmp_path / "c", [5, 3, 8])
    (tmp_path / "file").write_text("not a folder")
    dataset = open_dataset(corpus, 9, tmp_path / "file" / "cache")
    assert len(dataset) == len(open_dataset(corpus, 9)) and "in memory" in caplog.text
    assert "cannot be used" not in caplog.text


def count_builds(prefix, cache, queue):
    built = []
    build = gpt_corpus.build_index_maps
    gpt_corpus.build_index_maps = lambda *args: built.append(1) or build(*args)
    tokens = open_dataset(IndexedDataset(prefix), 9, cache)[8]["tokens"].tolist()
    queue.put((len(built), tokens))


def test_of_many_processes_one_builds(tmp_path):
    write(tmp_path / "c", [5, 3, 8])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(
            target=count_builds, args=(tmp_path / "c", tmp_path / "kept", queue)
        )
        for _ in range(6)
    ]
    for p in processes:
        p.start()
    results = [queue.get(timeout=HUNG) for _ in processes]
    for p in processes:
        p.join()
    assert (
        sum(built for built, _ in results) == 1
        and len({tuple(t) for _, t in results}) == 1
    )


def test_a_corpus_damaged_in_the_middle_is_found_when_the_indices_are_built(tmp_path):
    write(tmp_path / "c", [5, 3, 8])
    content = bytearray((tmp_path / "c.idx").read_bytes())
    content[38:42] = (4).to_bytes(4, "little")
    (tmp_path / "c.idx").write_bytes(content)
    with pytest.raises(DataError, match="does not continue"):
        open_dataset(IndexedDataset(tmp_path / "c"), 9)


def open_until_killed(n, prefix, cache):
    """Open in a child that is killed in its n-th change of the file system; whether it came so far."""
    pid = os.fork()
    if pid:
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    changes = count()

    def killed(change):
        def changed(*args, **more):
            if next(changes) == n:
                if change is np.save:  # in the middle of a file
                    args[0].write(b"\x93NUMPY")
                    args[0].flush()
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **more)

        return changed

    try:
        for owner, name in (
            (np, "save"),
            (os, "fsync"),
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "mkdir"),
        ):
            setattr(owner, name, killed(getattr(owner, name)))
        open_dataset(IndexedDataset(prefix), 9, cache)
    finally:
        os._exit(0)


def test_a_process_killed_at_any_moment_of_building_leaves_nothing_that_is_taken_for_complete(
    tmp_path,
):
    corpus = write(tmp_path / "c", [5, 3, 8])
    whole = open_dataset(corpus, 9, tmp_path / "whole")
    want = [whole[i]["tokens"].tolist() for i in range(len(whole))]
    names = sorted(os.listdir(tmp_path / "whole"))
    for n in count():
        cache = tmp_path / f"kept{n}"
        was_killed = open_until_killed(n, tmp_path / "c", cache)
        after = open_dataset(corpus, 9, cache)
        assert [after[i]["tokens"].tolist() for i in range(len(after))] == want
        assert (
            sorted(os.listdir(cache)) == names
        )  # and nothing half-written stays behind
        if not was_killed:
            break
    assert n > 12  # three arrays and a description, four steps each


def test_a_full_disk_means_indices_in_memory_built_once(tmp_path, monkeypatch, caplog):
    corpus = write(tmp_path / "c", [5, 3, 8])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    builds = []
    build = gpt_corpus.build_index_maps
    monkeypatch.setattr(
        gpt_corpus, "build_index_maps", lambda *args: builds.append(1) or build(*args)
    )
    dataset = open_dataset(corpus, 9, tmp_path / "kept")
    assert (
        "No space left on device" in caplog.text
        and len(builds) == 1
        and len(dataset) == 11
    )
    monkeypatch.undo()
    assert len(os.listdir(tmp_path / "kept")) == 1  # the lock
    assert len(open_dataset(corpus, 9, tmp_path / "kept")) == 11
