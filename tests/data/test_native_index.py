"""The compiled index builder equals the plain one on random cases: values, dtypes, and the state of the
random numbers."""

import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ds.data.loading import blend, index_maps
from megatron_ds.data.loading.blend import plain_draw
from megatron_ds.data.loading.index_maps import (
    build_index_maps,
    build_sample_index,
    plain_sample_index,
)
from megatron_ds.extensions.bert import maps

pytestmark = [
    pytest.mark.plan,
    pytest.mark.skipif(not index_maps.extension(), reason="the extension is not built"),
]


def equal(one, two):
    return (
        one.dtype == two.dtype and one.shape == two.shape and np.array_equal(one, two)
    )


def shares_of(kind, count, rng):
    weights = {
        "random": rng.random(count) + 1e-9,
        "equal": np.ones(count),
        "few values": rng.integers(1, 4, count),
        "wide": np.exp(rng.normal(0, 4, count)),
        "one large": np.r_[1e6, np.ones(count - 1)],
    }[kind].astype(float)
    return weights / weights.sum()


@pytest.mark.parametrize("threads", [1, 3])
def test_sample_index_equals_the_plain_one(threads):
    rng = np.random.default_rng(threads)
    for case in range(150):
        count = int(rng.choice([1, 5, 300, 40000 if case % 15 == 0 else 2]))
        lengths = rng.integers(0, rng.choice([2, 9, 900]), count).astype(np.int32)
        order = rng.integers(0, count, int(rng.integers(1, 3 * count + 1))).astype(
            rng.choice([np.int32, np.int64])
        )
        tokens, seq_length = int(lengths[order].sum()), int(rng.integers(1, 600))
        if tokens == 0:
            continue
        plain = plain_sample_index(lengths, order, seq_length)
        assert equal(
            index_maps.extension().sample_index_int32(
                lengths, order, seq_length, tokens, threads
            ),
            plain,
        )
        wide = index_maps.extension().sample_index_int64(
            lengths, order, seq_length, tokens, threads
        )
        assert equal(wide, plain.astype(np.int64))


def test_lengths_are_read_where_they_lie_in_a_file():
    lengths = np.frombuffer(
        b"x" * 34 + np.array([5, 3, 8, 1, 10, 4], "<i4").tobytes(), "<i4", 6, 34
    )
    assert not lengths.flags.aligned
    order = np.array([2, 0, 5, 4, 1, 3], np.int32)
    assert equal(
        build_sample_index(lengths, order, 4), plain_sample_index(lengths, order, 4)
    )


def test_a_wrong_number_of_tokens_is_an_error_and_writes_nothing_outside():
    lengths, order = np.full(9, 5, np.int32), np.arange(9, dtype=np.int32)
    for tokens in (1, 20, 44, 46):
        with pytest.raises(ValueError, match=f"hold 45 tokens, not {tokens}"):
            index_maps.extension().sample_index_int32(lengths, order, 4, tokens, 2)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
def test_shuffle_is_numpys_and_so_is_what_comes_after(dtype):
    for size in (0, 1, 2, 3, 255, 256, 257, 1000, 70000):
        one, two = np.random.RandomState(size), np.random.RandomState(size)
        for _ in range(3):
            a, b = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
            index_maps.shuffle(a, one)
            two.shuffle(b)
            assert equal(a, b)
        assert one.randint(10**9) == two.randint(10**9) and one.normal() == two.normal()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["random", "equal", "few values", "wide", "one large"])
def test_blends_equal_the_plain_ones(kind):
    rng = np.random.default_rng(len(kind))
    for _ in range(30):
        count, size = int(rng.choice([1, 2, 8, 9, 30, 150])), int(rng.integers(0, 1500))
        shares = shares_of(kind, count, rng)
        for limits in (None, rng.multinomial(size, shares).astype(np.int64)):
            if limits is not None and size:
                shares = limits / limits.sum()
            plain = plain_draw(shares, size, limits)
            for segment in (
                1,
                7,
                100,
                10**6,
            ):  # short ones begin wrong now and then, and are drawn again
                assert all(
                    map(
                        equal,
                        index_maps.extension().blend(shares, size, limits, segment, 2),
                        plain,
                    )
                )


def test_long_blends_equal_the_plain_ones():
    rng = np.random.default_rng(0)
    for shares in (shares_of("random", 64, rng), shares_of("wide", 12, rng)):
        assert all(
            map(
                equal,
                index_maps.extension().blend(shares, 40000, None, 9000, 2),
                plain_draw(shares, 40000, None),
            )
        )


def test_all_processors_draw_a_long_blend_and_one_a_short_one_of_many_datasets(
    monkeypatch,
):
    asked = []
    compiled = index_maps.extension()
    recorder = SimpleNamespace(
        blend=lambda *call: asked.append(call[3:]) or compiled.blend(*call)
    )
    monkeypatch.setattr(blend, "extension", lambda: recorder)
    monkeypatch.setattr(blend, "num_threads", lambda: 2)
    for datasets in (64, 1000):
        shares = shares_of("random", datasets, np.random.default_rng(0))
        which, _ = blend.build_blend_index(shares, 2_000_000)
        assert equal(which[:300], plain_draw(shares, 300, None)[0])
    assert asked == [(500_000, 2), (2_000_000, 1)]  # (segment, threads)
    for datasets in (1, 8, 64, 1000, 32767):
        for size in (0, 1, 131_071, 262_144, 10**7, 10**8 + 1, 10**10):
            threads, segment = blend.plan_threads(datasets, size, 16)
            assert 1 <= threads <= 16 and (
                threads == 1 or size // segment == 2 * threads
            )
            assert threads == 1 or threads * datasets * 60 <= size * 10 / 2000
    assert [
        blend.plan_threads(1000, size, 16)[0] for size in (10**7, 10**8, 10**9)
    ] == [1, 8, 16]


def test_shares_that_do_not_sum_to_one_are_drawn_the_same():
    rng = np.random.default_rng(0)
    for total in (0.3, 0.999, 1.7):
        shares = shares_of("random", 20, rng) * total
        shares[3::7] = 0
        assert all(
            map(
                equal,
                index_maps.extension().blend(shares, 3000, None, 500, 2),
                plain_draw(shares, 3000, None),
            )
        )


def test_bert_rows_equal_the_plain_ones():
    rng = np.random.default_rng(0)
    for _ in range(250):
        bounds = np.r_[
            0, np.cumsum(rng.integers(0, rng.integers(2, 15), int(rng.integers(0, 30))))
        ]
        sizes = rng.integers(0, rng.choice([5, 40, 520]), bounds[-1] + 2).astype(
            np.int32
        )
        bounds = bounds[int(rng.integers(0, len(bounds))) :]
        titles = rng.integers(0, 9, len(bounds)).astype(np.int32)
        epochs, most, longest, seed = (
            int(rng.integers(*span))
            for span in ((0, 4), (0, 60), (2, 150), (0, 2**31 - 1))
        )
        ratio, least = int(rng.choice([0, 1, 3, 10])), int(rng.integers(0, 4))
        native, arguments = (
            index_maps.extension(),
            (bounds, sizes, epochs, most, longest, ratio, seed, least),
        )
        plain = maps.plain_mapping(*arguments)
        assert equal(native.mapping_uint32(*arguments), plain)
        assert equal(native.mapping_uint64(*arguments), plain.astype(np.uint64))
        arguments = (bounds, sizes, titles, epochs, most, longest, seed, 1 + least % 2)
        plain = maps.plain_blocks_mapping(*arguments)
        assert equal(native.blocks_mapping_uint32(*arguments), plain)
        assert equal(native.blocks_mapping_uint64(*arguments), plain.astype(np.uint64))


def test_without_the_extension_numpy_builds_the_same_and_says_so_once(
    monkeypatch, caplog
):
    lengths, documents = np.array([5, 3, 8, 1, 10, 4], np.int32), np.arange(6)
    compiled = build_index_maps(lengths, documents, 4, 16, seed=1234)
    # importing it is an ImportError then
    monkeypatch.setitem(sys.modules, "megatron_ds._index_builder", None)
    index_maps.extension.cache_clear()
    try:
        for _ in range(2):
            plain = build_index_maps(lengths, documents, 4, 16, seed=1234)
    finally:
        monkeypatch.undo()
        index_maps.extension.cache_clear()
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert equal(getattr(plain, name), getattr(compiled, name))
    assert caplog.text.count("not compiled") == 1


def test_other_threads_of_python_run_meanwhile():
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(0)

    clock = threading.Thread(target=tick)
    clock.start()
    shares = np.full(8, 1 / 8) + np.arange(8) * 1e-3
    index_maps.extension().blend(
        shares / shares.sum(), 2_000_000, None, 10**7, 1
    )  # some 30 ms
    stop.set()
    clock.join()
    assert len(ticks) > 2
