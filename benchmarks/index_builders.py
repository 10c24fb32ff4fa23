"""Index maps: our builder beside Megatron's compiled helpers, in one run: time, peak memory, and equal
results.

    python benchmarks/index_builders.py                 # needs megatron-core; two minutes
    python benchmarks/index_builders.py --only "blend of 64"

Contestants take turns within a case. Memory is of a process of its own for each contestant and case: the
highest resident size while building, less the size before; a thousandth of the case is built first, so that
what is counted is no code that is loaded. Inputs are mock data: lengths of documents and sentences are
log-normal, weights uniform.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from megatron_ds.data.loading import blend, index_maps
from megatron_ds.extensions.bert import maps

ITEMS = 10_000_000


def sample_index(items, seq_length):
    """The first token of each sample, for documents of 500 tokens on average."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(5.7, 1.0, items)
    lengths = np.maximum(1, lengths * (500 / lengths.mean())).astype(np.int32)
    order = rng.permutation(len(lengths)).astype(np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    return (
        lambda peer: peer.build_sample_idx_int32(
            lengths, order, seq_length, 1, tokens, True, 1
        ),
        lambda: index_maps.build_sample_index(lengths, order, seq_length, tokens),
    )


def document_shuffle(items):
    """The order of the documents; theirs is numpy's shuffle."""

    def ours():
        array = np.arange(items, dtype=np.int32)
        index_maps.shuffle(array, np.random.RandomState(1234))
        return array

    def numpys(_):
        array = np.arange(items, dtype=np.int32)
        np.random.RandomState(1234).shuffle(array)
        return array

    return numpys, ours


def weighted(size, count):
    """A blend of corpora by weight."""
    shares = np.random.default_rng(1).random(count)
    shares /= shares.sum()

    def theirs(peer):
        which = np.zeros(size, np.int16)
        sample = np.zeros(size, np.int64)
        peer.build_blending_indices(which, sample, shares, count, size, False)
        return which, sample

    return theirs, lambda: blend.build_blend_index(shares, size)


def exhaustive(size, count):
    """A blend in which every sample of each corpus occurs once."""
    sizes = (
        np.random.default_rng(1)
        .multinomial(size, np.full(count, 1 / count))
        .astype(np.int64)
    )

    def theirs(peer):
        which = np.zeros(size, np.int16)
        sample = np.zeros(size, np.int64)
        peer.build_exhaustive_blending_indices(which, sample, sizes, count)
        return which, sample

    return theirs, lambda: blend.build_exhaustive_index(sizes)


def sentences(items, longest):
    """The samples of BERT. longest: tokens of one."""
    rng = np.random.default_rng(2)
    bounds = np.r_[0, np.cumsum(rng.integers(2, 30, items * 645 // 10_000))]
    sizes = np.maximum(2, rng.lognormal(3.0, 0.6, int(bounds[-1]))).astype(np.int32)
    return (
        lambda peer: peer.build_mapping(
            bounds, sizes, 1, 2**62, longest, 0.1, 1234, False, 2
        ),
        lambda: maps.build_mapping(
            bounds,
            sizes,
            num_epochs=1,
            max_num_samples=2**62,
            max_seq_length=longest,
            short_seq_prob=0.1,
            seed=1234,
            min_num_sent=2,
        ),
    )


# name: (maker of both contestants, its arguments besides the number of items, rounds)
CASES = {
    "sample index, 10M documents, s = 2048": (sample_index, (2048,), 7),
    "sample index, 10M documents, s = 512": (sample_index, (512,), 7),
    "shuffle of 10M documents (numpy's)": (document_shuffle, (), 3),
    "blend of 8, 10M samples": (weighted, (8,), 3),
    "blend of 64, 10M samples": (weighted, (64,), 5),
    "blend of 1000, 10M samples": (weighted, (1000,), 2),
    "exhaustive blend of 64, 10M samples": (exhaustive, (64,), 2),
    "BERT mapping, 10M sentences, 509 tokens": (sentences, (509,), 7),
    "BERT mapping, 10M sentences, 125 tokens": (sentences, (125,), 5),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument(
        "--memory-of", help="one contestant: what a child process measures"
    )
    options = parser.parse_args()
    import megatron.core.datasets.helpers_cpp as peer

    assert index_maps.extension(), "our builder is not compiled"
    if options.memory_of:
        make, details, _ = CASES[options.only]
        run(make(ITEMS // 1000, *details), options.memory_of, peer)
        return print(
            json.dumps(memory_of(make(ITEMS, *details), options.memory_of, peer))
        )
    print(
        "| case | theirs, s: median (least–most) | ours, s | faster | memory, MiB: theirs | ours |"
    )
    print("|---|---|---|---|---|---|")
    for name, (make, details, rounds) in CASES.items():
        if options.only in name:
            print(row(name, make(ITEMS, *details), rounds, peer), flush=True)


def row(name, case, rounds, peer):
    """A row of the table; raises if the results differ."""
    theirs, ours = case
    times = [], []
    for _ in range(rounds):
        for spent, build in zip(times, (lambda: theirs(peer), ours)):
            start = time.perf_counter()
            result = build()
            spent.append(time.perf_counter() - start)
            assert build is ours or (expected := result) is not None
    # Equal results, then times and memory.
    assert same(expected, result), f"{name}: results differ"
    a, b = (f"{statistics.median(t):.3f} ({min(t):.3f}–{max(t):.3f})" for t in times)
    memory = [
        statistics.median(measured_apart(name, who) for _ in range(3))
        for who in ("theirs", "ours")
    ]
    ratio = statistics.median(times[0]) / statistics.median(times[1])
    return f"| {name} | {a} | {b} | {ratio:.1f}× | {memory[0]:.1f} | {memory[1]:.1f} |"


def same(one, two):
    if isinstance(one, tuple):
        return all(map(same, one, two))
    return (
        one.dtype == two.dtype and one.shape == two.shape and np.array_equal(one, two)
    )


def measured_apart(name, who):
    command = [sys.executable, __file__, "--only", name, "--memory-of", who]
    return json.loads(
        subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.splitlines()[-1]
    )


def run(case, who, peer):
    theirs, ours = case
    return ours() if who == "ours" else theirs(peer)


def memory_of(case, who, peer):
    """MiB above what the inputs take, at the highest point of building."""
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # the highest size so far counts from here
    before = resident("VmRSS")
    result = run(case, who, peer)
    return (resident("VmHWM") - before) / 1024 if result is not None else None


def resident(field):
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field))


if __name__ == "__main__":
    main()
