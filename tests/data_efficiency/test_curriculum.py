"""Which samples a curriculum deals out: against plain simulations, and the same after any resume."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.data.loading.loader import Loader
from megatron_ds.data.samples.gpt_data import GPTCollator
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.extensions.data_efficiency.curricula import read_metric
from megatron_ds.extensions.data_efficiency.curriculum_order import (
    CurriculumOrder,
    MetricIndex,
    Phase,
    _floor_sum,
    order_by_difficulty,
    shuffled,
)
from megatron_ds.extensions.data_efficiency.difficulty_metrics import write_metric
from megatron_ds.progress.ramps import BatchSize

pytestmark = pytest.mark.plan

stages_of_sizes = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 25)), min_size=1, max_size=6
)


def make_stages(gaps) -> list[Phase]:
    starts = itertools.accumulate((gap for gap, _ in gaps), initial=0)
    return [
        Phase(start, admitted)
        for start, admitted in zip(starts, itertools.accumulate(new for _, new in gaps))
    ]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_sum_of_floors_is_what_adding_them_up_gives(data):
    m = data.draw(st.integers(1, 50))
    n, a, b = (data.draw(st.integers(0, most)) for most in (m, m - 1, 2 * m - 1))
    assert _floor_sum(n, m, a, b).item() == sum((a * i + b) // m for i in range(n))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_a_shuffle_meets_each_place_once_and_depends_on_its_key(size):
    places = np.arange(size)
    one, other = (
        shuffled(places, np.full(size, size), np.full(size, key)) for key in (1, 2)
    )
    assert sorted(one) == sorted(other) == places.tolist()
    assert size < 5 or one.tolist() != other.tolist()


def test_shuffles_leave_no_pattern():
    """Over many keys each of four places goes everywhere alike: chi-square with 9 degrees of freedom, 99.9 %
    below 27.9."""
    keys = np.repeat(np.arange(4000), 4)
    to = shuffled(np.tile(np.arange(4), 4000), np.full(16000, 4), keys).reshape(4000, 4)
    counts = np.stack([(to == target).sum(0) for target in range(4)])
    assert ((counts - 1000) ** 2 / 1000).sum() < 27.9


@settings(max_examples=60, deadline=None)
@given(gaps=stages_of_sizes, seed=st.integers(0, 100), extra=st.integers(0, 9))
def test_each_cluster_is_gone_through_without_repeating_and_none_is_drawn_before_its_time(
    gaps, seed, extra
):
    stages = make_stages(gaps)
    total = stages[-1].admitted + extra  # some samples are never admitted
    easiest_first = np.random.default_rng(seed).permutation(total)
    drawn = CurriculumOrder(easiest_first, stages, seed)(
        np.arange(stages[-1].start + 200), total
    )
    rank = np.argsort(easiest_first)[
        drawn
    ]  # place of each drawn sample among the easiest
    bounds = [0, *(stage.admitted for stage in stages)]
    for stage, upto in zip(
        stages, [*(stage.start for stage in stages[1:]), len(drawn)]
    ):
        assert rank[stage.start : upto].max(initial=0) < stage.admitted
    for low, high in itertools.pairwise(bounds):
        mine = rank[(low <= rank) & (rank < high)]
        for pass_ in range(0, len(mine), high - low):
            assert max(Counter(mine[pass_ : pass_ + high - low].tolist()).values()) == 1


@settings(max_examples=40, deadline=None)
@given(gaps=stages_of_sizes, seed=st.integers(0, 100))
def test_a_stage_draws_from_its_clusters_in_proportion_to_their_sizes(gaps, seed):
    """Each cluster gets as many of T consecutive draws of a stage with T samples as it has samples."""
    stages = make_stages(gaps)
    last = stages[-1]
    here = np.arange(last.start, last.start + 3 * last.admitted)
    drawn = CurriculumOrder(np.arange(last.admitted), stages, seed)(here, 10**6)
    bounds = [0, *(stage.admitted for stage in stages)]
    for first in range(2 * last.admitted + 1):
        counts, _ = np.histogram(drawn[first : first + last.admitted], bounds)
        assert counts.tolist() == np.diff(bounds).tolist()


@settings(max_examples=40, deadline=None)
@given(gaps=stages_of_sizes, seed=st.integers(0, 100), start=st.integers(0, 300))
def test_a_position_has_its_sample_whatever_was_asked_before(gaps, seed, start):
    stages = make_stages(gaps)
    whole = CurriculumOrder(np.arange(200), stages, seed)(np.arange(400), 200)
    part = CurriculumOrder(np.arange(200), stages, seed)(
        np.arange(start, 400)[::-1], 200
    )
    assert part[::-1].tolist() == whole[start:].tolist()


def test_another_seed_draws_in_another_order():
    one, other = (
        CurriculumOrder(np.arange(100), [Phase(0, 100)], seed)(
            np.arange(100), 100
        ).tolist()
        for seed in (1, 2)
    )
    assert one != other and sorted(one) == sorted(other) == list(range(100))


def test_more_stages_than_can_be_kept_apart_are_a_data_error():
    stages = [Phase(i, i + 1) for i in range(3000)]
    with pytest.raises(
        DataError,
        match="3000 times; at most 2048 are possible. Use a larger difficulty_step",
    ):
        CurriculumOrder(np.arange(3000), stages, 1)


# ------------------------------------------------------------------ from index files
def metric(
    folder,
    values,
    name="rare",
    kind="value",
    low=1,
    high=50,
    schedule="fixed_linear",
    config=None,
    **more,
):
    write_metric(folder / name / name, np.asarray(values))
    config = (
        {"total_curriculum_step": 20, "difficulty_step": 1}
        if config is None
        else config
    )
    return {
        "name": name,
        "index_to_sample_path": f"{folder}/{name}/{name}_index_to_sample",
        "index_to_metric_path": f"{folder}/{name}/{name}_index_to_metric",
        "difficulty_type": kind,
        "clustering_type": "schedule_based",
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": schedule,
        "schedule_config": config,
        **more,
    }


def order_of(folder, *blocks, total, steps=60, batch_at=lambda n: 8, **more):
    metrics = [read_metric(json.dumps(block)) for block in blocks]
    return order_by_difficulty(
        metrics,
        total,
        seed=3,
        steps=steps,
        batch_at=batch_at,
        cache=folder / "cache",
        **more,
    )


def admitted_by_hand(block, values, step) -> set[int]:
    """What DeepSpeed's documentation says, in loops over the values themselves."""
    difficulty = read_metric(json.dumps(block)).difficulty
    reached = max(difficulty.at(s) for s in range(1, step + 1))
    if block["difficulty_type"] == "value":
        return {i for i, value in enumerate(values) if value <= reached}
    easiest = sorted(range(len(values)), key=lambda i: (values[i], i))
    most = block["max_difficulty"]
    return set(easiest if reached == most else easiest[: len(values) // most * reached])


@pytest.mark.parametrize(
    "cases",
    [
        [{"kind": "value"}],
        [{"kind": "percentile", "low": 10, "high": 100}],
        [
            {"kind": "value"},
            {
                "kind": "percentile",
                "low": 30,
                "high": 100,
                "schedule": "fixed_root",
                "config": {
                    "total_curriculum_step": 30,
                    "difficulty_step": 5,
                    "root_degree": 2,
                },
            },
        ],
        [
            {
                "kind": "value",
                "schedule": "fixed_discrete",
                "config": {"difficulty": [5, 40, 10, 45], "max_step": [3, 9, 20]},
            }
        ],
    ],
    ids=["value", "percentile", "both", "a schedule that falls"],
)
def test_at_each_step_the_samples_that_the_metrics_admit_are_drawn_and_no_others(
    tmp_path, cases
):
    columns = [np.random.default_rng(i).integers(1, 51, 733) for i in range(len(cases))]
    blocks = [
        metric(tmp_path, values, name=f"m{i}", **case)
        for i, (values, case) in enumerate(zip(columns, cases))
    ]
    order = order_of(tmp_path, *blocks, total=733)
    positions = np.arange(60 * 8)
    drawn = order(positions, 733).reshape(60, 8)
    stage = np.searchsorted(order.starts, positions[::8], side="right")
    for step in range(1, 61):
        by_hand = set.intersection(
            *(
                admitted_by_hand(block, values, step)
                for block, values in zip(blocks, columns)
            )
        )
        assert (
            set(order.easiest_first[: order.bounds[stage[step - 1]]].tolist())
            == by_hand
        )
        assert set(drawn[step - 1].tolist()) <= by_hand
    assert len(order.starts) >= 3


def test_a_difficulty_counts_from_the_position_where_its_step_begins_while_the_batch_grows(
    tmp_path,
):
    grows = BatchSize.growing(4, 4, 16, 48)
    order = order_of(
        tmp_path, metric(tmp_path, np.arange(1, 51)), total=50, batch_at=grows.at
    )
    difficulty = read_metric(json.dumps(metric(tmp_path, np.arange(1, 51)))).difficulty
    begins = list(
        itertools.islice(
            itertools.accumulate(itertools.repeat(0), lambda n, _: n + grows.at(n)), 20
        )
    )
    for step, position in enumerate(begins, 1):
        assert order.bounds[
            np.searchsorted(order.starts, position, side="right")
        ] == difficulty.at(step)


class Numbers:
    """Sample i holds its own number."""

    def __init__(self, total):
        self.total, self.asked = total, []

    def __len__(self):
        return self.total

    def __getitem__(self, i):
        self.asked.append(i)
        return {"tokens": np.full(5, i, np.int64)}


@pytest.mark.parametrize(
    "batch_size", [BatchSize.constant(16), BatchSize.growing(8, 8, 16, 120)]
)
def test_a_run_resumed_anywhere_with_other_ranks_sees_the_samples_of_one_that_never_stopped(
    tmp_path, batch_size
):
    values = np.random.default_rng(1).integers(1, 51, 300)
    block = metric(tmp_path, values)

    def global_batches(first_step, dp_size, micro_batch):
        """The samples of each step from the given one on, put together from all ranks in stream order."""
        order = order_of(tmp_path, block, total=300, batch_at=batch_size.at)
        loader = Loader(
            Numbers(300),
            GPTCollator(4, 300, 0),
            micro_batch_size=micro_batch,
            order=order,
        )
        steps, n = [], sum_of_steps(first_step)
        for _ in range(first_step, 30):
            size = batch_size.at(n)
            seen = {}
            for rank in range(dp_size):
                batch = loader.batch(n, size, rank, dp_size)
                seen |= dict(zip(batch.sample_ids, batch.tokens[:, 0].tolist()))
            assert sorted(seen) == list(range(n, n + size))
            steps.append([seen[i] for i in sorted(seen)])
            n += size
        return steps

    def sum_of_steps(count):
        n = 0
        for _ in range(count):
            n += batch_size.at(n)
        return n

    whole = global_batches(0, 1, 2)
    for first_step, dp_size, micro_batch in [
        (1, 2, 2),
        (7, 4, 1),
        (13, 2, 4),
        (29, 8, 1),
    ]:
        assert global_batches(first_step, dp_size, micro_batch) == whole[first_step:]
    assert max(values[whole[0]]) <= 3 < max(values[whole[-1]])


def test_longer_training_changes_nothing_of_what_was_drawn(tmp_path):
    block = metric(tmp_path, np.random.default_rng(1).integers(1, 51, 300))
    short, long = (
        order_of(tmp_path, block, total=300, steps=steps)(np.arange(80), 300)
        for steps in (10, 1000)
    )
    assert short.tolist() == long.tolist()


# ------------------------------------------------------------------ what bad input gets
@pytest.mark.parametrize(
    "change, total, said",
    [
        (
            {"min_difficulty": 0, "max_difficulty": 4},
            60,
            "admits no sample at step 1 .rare: the smallest value is 5.. Raise",
        ),
        ({}, 61, "sorts 60 samples, and an epoch of the training data has 61"),
        ({"index_to_sample_path": "nowhere"}, 60, "nowhere.idx does not exist"),
        (
            {
                "difficulty_type": "percentile",
                "min_difficulty": 1,
                "max_difficulty": 100,
            },
            60,
            "60 samples are divided into 100 parts",
        ),
    ],
)
def test_an_index_that_cannot_serve_is_a_data_error(tmp_path, change, total, said):
    block = {**metric(tmp_path, np.arange(60) + 5), **change}
    with pytest.raises(DataError, match=said):
        order_of(tmp_path, block, total=total)


def test_values_beside_percentiles_are_a_data_error(tmp_path):
    block = metric(tmp_path, np.arange(500) % 400)
    block["index_to_sample_path"] += "_percentile_merged"
    with pytest.raises(
        DataError,
        match="does not hold one value, in ascending order, for each of the 100 rows",
    ):
        order_of(tmp_path, block, total=500)


def test_an_analysis_of_other_data_is_a_data_error(tmp_path):
    block = metric(tmp_path, np.arange(60) + 1)
    (tmp_path / "rare" / "analysis.json").write_text(
        json.dumps({"dataset": {"data": ["a"], "seed": 1, "samples": 60}})
    )
    order_of(
        tmp_path, block, total=60, identity={"data": ["a"], "seed": 1, "samples": 60}
    )
    with pytest.raises(DataError, match="made from other data: seed 1 instead of 2"):
        order_of(
            tmp_path,
            block,
            total=60,
            identity={"data": ["a"], "seed": 2, "samples": 60},
        )


@pytest.mark.parametrize(
    "change, said",
    [
        ({"name": ""}, 'with the metric\'s "name"'),
        ({"difficulty": 5}, "unknown difficulty"),
        ({"clustering_type": "schedule"}, "it must be schedule_based"),
        ({"clustering_type": "single_cluster"}, "have no effect"),
        ({"difficulty_type": "values"}, "it must be value or percentile"),
        ({"index_to_metric_path": None}, "give the prefix"),
        ({"schedule_type": "linear"}, "schedule_type is 'linear'"),
        (
            {"difficulty_type": "percentile", "min_difficulty": 0},
            "0 of 50 percentiles admits no sample",
        ),
    ],
)
def test_a_wrong_metric_is_named_with_its_key(tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        read_metric(json.dumps({**metric(tmp_path, np.arange(60)), **change}))
    with pytest.raises(ConfigError, match="is not JSON"):
        read_metric("{name: rare}")


def test_the_order_of_several_metrics_is_built_again_for_an_index_that_differs_in_any_sample(
    tmp_path,
):
    total = 64 * 4096 * 3
    values = np.arange(total)
    block = metric(tmp_path, values)
    first = MetricIndex(read_metric(json.dumps(block)), total)
    before = first.fingerprint()
    # Two samples between the 64 blocks of 4,096 that are spaced evenly.
    values[[5000, 5001]] = values[[5001, 5000]]
    metric(tmp_path, values)
    other = MetricIndex(read_metric(json.dumps(block)), total)
    assert other.fingerprint() != before
