"""Curriculum against DeepSpeed's own functions, on random parameters: difficulties, clusters, index files,
resuming.

    PYTHONPATH=. python benchmarks/curriculum_peers.py    # where deepspeed is installed; about a minute

Prints a table; exits with 1 where something that must be equal is not. DeepSpeed's sampler runs alone,
without a launcher: its barrier and its broadcast among one rank do nothing.
"""

import argparse
import contextlib
import io
import itertools
import json
import logging
import random
import sys
import tempfile
import types
from pathlib import Path

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from deepspeed.runtime.data_pipeline.data_sampling import data_analyzer, data_sampler
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import (
    MMapIndexedDataset,
)

from megatron_ds.errors import DataError
from megatron_ds.extensions.data_efficiency.curricula import read_metric
from megatron_ds.extensions.data_efficiency.curriculum_order import order_by_difficulty
from megatron_ds.extensions.data_efficiency.difficulty import make_difficulty
from megatron_ds.extensions.data_efficiency.difficulty_analysis import (
    map_shard,
    reduce_metric,
)
from megatron_ds.extensions.data_efficiency.difficulty_metrics import (
    ListFile,
    MetricSpec,
    write_metric,
)

FILES = (
    "sample_to_metric",
    "index_to_metric",
    "index_to_sample",
    "index_to_sample_percentile_merged",
)
alone = types.SimpleNamespace(size=lambda: 1)
data_sampler.dist = data_analyzer.dist = types.SimpleNamespace(
    barrier=lambda **_: None, broadcast=lambda *_, **__: None
)


def random_schedule(rng: random.Random, low: int, high: int) -> dict:
    kind = rng.choice(["fixed_linear", "fixed_root", "fixed_discrete"])
    if kind == "fixed_discrete":
        count = rng.randint(2, 8)
        config = {
            "difficulty": [rng.randint(low, high) for _ in range(count)],
            "max_step": sorted(rng.sample(range(1, 60), count - 1)),
        }
    else:
        config = {
            "total_curriculum_step": rng.randint(1, 80),
            "difficulty_step": rng.choice([1, 2, 7, 8, 16, 64]),
        }
        if kind == "fixed_root":
            config["root_degree"] = rng.choice([1, 2, 3, 4, 0.5, 1.7])
    return {
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": kind,
        "schedule_config": config,
    }


def compare_difficulties(cases: int) -> tuple[int, int]:
    """(integers compared, unequal)."""
    rng = random.Random(0)
    compared = 0
    unequal = 0
    for _ in range(cases):
        low = rng.randint(1, 300)
        block = random_schedule(
            rng, low, low + rng.choice([0, rng.randint(0, 20), rng.randint(0, 5000)])
        )
        theirs = CurriculumScheduler(block)
        ours = make_difficulty(block)
        for step in range(1, 200):
            compared += 1
            unequal += theirs.update_difficulty(step) != ours.at(step)
    return compared, unequal


def write_random_metric(
    rng: random.Random, folder: Path, name: str, total: int
) -> np.ndarray:
    values = np.random.default_rng(rng.randrange(2**31)).integers(
        1, rng.choice([3, 40, 400]), total
    )
    write_metric(folder / name / name, values)
    return values


def random_metrics(rng: random.Random, folder: Path, total: int) -> dict[str, dict]:
    """One metric, or two; each schedule rises, since upstream admits samples twice where a difficulty falls."""
    metrics = {}
    for name in ("a", "b")[: rng.choice([1, 1, 2])]:
        values = write_random_metric(rng, folder, name, total)
        kind = rng.choice(["value", "percentile"])
        low, high = (
            (int(values.min()), int(values.max()))
            if kind == "value"
            else (rng.randint(1, 20), 100)
        )
        block = random_schedule(rng, low, high)
        if "difficulty" in block["schedule_config"]:
            block["schedule_config"]["difficulty"].sort()
        metrics[name] = {
            "index_to_sample_path": str(folder / name / f"{name}_index_to_sample"),
            "index_to_metric_path": str(folder / name / f"{name}_index_to_metric"),
            "difficulty_type": kind,
            "clustering_type": "schedule_based",
            **block,
        }
    return metrics


def upstream_sampler(
    metrics: dict, folder: Path, total: int, batch: int, seed: int = 1234
):
    config = {
        "seed": seed,
        "data_sampling": {
            "num_epochs": 1000,
            "curriculum_learning": {
                "enabled": True,
                "data_cluster_path": str(folder / "clusters"),
                "curriculum_metrics": metrics,
            },
        },
    }
    return data_sampler.DeepSpeedDataSampler(config, total, batch, 0, 1, alone, 1, 0)


def our_order(metrics: dict, folder: Path, total: int, batch: int, steps: int):
    texts = [json.dumps({"name": name, **block}) for name, block in metrics.items()]
    return order_by_difficulty(
        [read_metric(text) for text in texts],
        total,
        seed=1234,
        steps=steps,
        batch_at=lambda n: batch,
        cache=folder / "cache",
    )


def compare_clusters(cases: int) -> dict[str, int]:
    """Which samples are admitted at each step, and in which cluster they are."""
    rng = random.Random(1)
    counts = dict.fromkeys(
        ("cases", "clusters", "samples", "unequal", "nothing at step 1"), 0
    )
    for _ in range(cases):
        total = rng.randint(100, 2000)
        batch = rng.choice([1, 4, 16])
        steps = 60
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            metrics = random_metrics(rng, folder, total)
            theirs = upstream_sampler(metrics, folder, total, batch)
            try:
                order = our_order(metrics, folder, total, batch, steps)
            except DataError as error:
                assert "admits no sample at step 1" in str(error), error
                counts["nothing at step 1"] += 1  # where upstream divides by zero
                continue
            # The clusters of both.
            counts["cases"] += 1
            drawn = [draw(theirs) for _ in range(steps)]
            clusters = [
                np.sort(np.copy(cluster[0])) for cluster in theirs.data_clusters
            ]
            bounds = order.bounds.tolist()
            ours = [
                np.sort(order.easiest_first[a:b]) for a, b in itertools.pairwise(bounds)
            ]
            counts["clusters"] += len(clusters)
            counts["samples"] += sum(map(len, clusters))
            same = len(ours) == len(clusters) and all(
                map(np.array_equal, ours, clusters)
            )
            # All that is drawn up to a step is as easy as this step allows.
            stage = np.searchsorted(
                order.starts, np.arange(steps) * batch, side="right"
            )
            mine = order(np.arange(steps * batch), total).reshape(steps, batch)
            easiest = [
                set(order.easiest_first[: order.bounds[k]].tolist())
                for k in range(len(bounds))
            ]
            inside = all(
                set(a) <= easiest[k] and set(b.tolist()) <= easiest[k]
                for a, b, k in zip(drawn, mine, stage)
            )
            counts["unequal"] += not (same and inside)
    return counts


def draw(sampler) -> list[int]:
    sampler.get_next_global_batch()
    return sampler.batch


class Rows(torch.utils.data.Dataset):
    """Samples of 33 tokens, as both analyzers take them."""

    def __init__(self, total: int):
        self.tokens = (
            np.minimum(np.random.default_rng(2).zipf(1.3, (total, 33)), 100) - 1
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int):
        return {"tokens": self.tokens[i].astype(np.int64)}


def upstream_analysis(rows: Rows, folder: Path, workers: int = 2) -> None:
    """Megatron-DeepSpeed's two metrics by DeepSpeed's analyzer."""

    def frequency(data):
        return torch.bincount(data.view(-1), minlength=101)

    def analyse(name, function, kind):
        for worker in range(workers):
            analyzer = data_analyzer.DataAnalyzer(
                torch.from_numpy(rows.tokens),
                num_workers=workers,
                worker_id=worker,
                batch_size=64,
                metric_names=[name],
                metric_functions=[function],
                metric_types=[kind],
                metric_dtypes=[torch.int64],
                save_path=str(folder),
            )
            analyzer.run_map()
        analyzer.run_reduce()

    analyse("total_vocab_freq", frequency, "accumulate_value_over_samples")
    counts = MMapIndexedDataset(
        str(folder / "total_vocab_freq/total_vocab_freq_metric_value"), skip_warmup=True
    )
    table = np.copy(
        counts[0]
    )  # while `counts` lives: its arrays dangle when it is gone
    table[table == 0] = 1
    table = torch.tensor(table, dtype=torch.double)
    table = -torch.log(table / sum(table))
    analyse(
        "vocab_rarity",
        lambda data: torch.tensor([int(torch.sum(table[row]).item()) for row in data]),
        "single_value_per_sample",
    )


def compare_analysis(total: int) -> dict[str, bool]:
    rows = Rows(total)
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        # Both analyses of the same rows.
        theirs = Path(name) / "theirs"
        ours = Path(name) / "ours"
        upstream_analysis(rows, theirs)
        dataset_id = {"samples": total}
        for metric in ("total_vocab_freq", "vocab_rarity"):
            spec = MetricSpec(metric, vocab_size=101, seq_length=32)
            for shard in range(3):
                map_shard(rows, ours, shard, 3, [spec], dataset_id)
            reduce_metric(ours, spec, 3, dataset_id)
        # Their files: bytes, and what each reader finds in the other's.
        names = [f"vocab_rarity/vocab_rarity_{what}" for what in FILES] + [
            "total_vocab_freq/total_vocab_freq_metric_value"
        ]
        bins = all(
            (theirs / f"{n}.bin").read_bytes() == (ours / f"{n}.bin").read_bytes()
            for n in names
        )
        readers = all(
            _same_rows(
                ListFile(theirs / n),
                MMapIndexedDataset(str(ours / n), skip_warmup=True),
            )
            for n in names
        )
        # The order of samples that follows from either folder, in DeepSpeed's sampler and in ours.
        block = {
            "difficulty_type": "value",
            "clustering_type": "schedule_based",
            "min_difficulty": 70,
            "max_difficulty": 200,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 30, "difficulty_step": 1},
        }
        paths = [
            {
                f"index_to_{what}_path": str(
                    folder / f"vocab_rarity/vocab_rarity_index_to_{what}"
                )
                for what in ("sample", "metric")
            }
            for folder in (theirs, ours)
        ]
        on_ours = upstream_sampler(
            {"vocab_rarity": {**block, **paths[1]}}, Path(name) / "x", total, 16
        )
        on_theirs = upstream_sampler(
            {"vocab_rarity": {**block, **paths[0]}}, Path(name) / "y", total, 16
        )
        sampler = all(draw(on_ours) == draw(on_theirs) for _ in range(40))
        orders = [
            our_order({"vocab_rarity": {**block, **p}}, Path(name), total, 16, 60)
            for p in paths
        ]
        order = np.array_equal(*(o(np.arange(900), total) for o in orders))
    return {
        ".bin files are byte-identical": bins,
        "each reads the other's files": readers,
        "DeepSpeed's sampler draws the same from both": sampler,
        "our order is the same from both": order,
    }


def _same_rows(ours: ListFile, theirs) -> bool:
    return len(ours) == len(theirs) and all(
        np.array_equal(ours[i], theirs[i]) for i in range(len(ours))
    )


def resumed_draws(cases: int) -> tuple[int, int, int]:
    """(cases, in which upstream went on with other samples after a resume, and in which we did)."""
    rng = random.Random(3)
    theirs = 0
    ours = 0
    for _ in range(cases):
        with (
            tempfile.TemporaryDirectory() as name,
            contextlib.redirect_stdout(io.StringIO()),
        ):
            folder = Path(name)
            total = 500
            batch = 8
            values = write_random_metric(rng, folder, "a", total)
            metrics = {
                "a": {
                    "index_to_sample_path": str(folder / "a/a_index_to_sample"),
                    "difficulty_type": "value",
                    "index_to_metric_path": str(folder / "a/a_index_to_metric"),
                    "clustering_type": "schedule_based",
                    "min_difficulty": int(values.min()),
                    "max_difficulty": int(values.max()),
                    "schedule_type": "fixed_linear",
                    "schedule_config": {
                        "total_curriculum_step": 40,
                        "difficulty_step": 1,
                    },
                }
            }
            # Upstream, whose second sampler resumes from the state of the first.
            first = upstream_sampler(metrics, folder, total, batch)
            before = [draw(first) for _ in range(20)]
            state = first.state_dict()
            after = [draw(first) for _ in range(20)]
            second = upstream_sampler(metrics, folder, total, batch)
            second.load_state_dict(state)
            theirs += [draw(second) for _ in range(20)] != after
            # Ours, whose order is a function of the position.
            whole = our_order(metrics, folder, total, batch, 40)(
                np.arange(40 * batch), total
            )
            rest = our_order(metrics, folder, total, batch, 60)(
                np.arange(20 * batch, 40 * batch), total
            )
            ours += not np.array_equal(whole[len(before) * batch :], rest)
    return cases, theirs, ours


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    logging.disable(logging.CRITICAL)
    # Difficulties at each step.
    rows = []
    bad = 0
    compared, unequal = compare_difficulties(2000)
    rows.append(
        (
            f"difficulties: 2,000 schedules × 199 steps = {compared:,} integers",
            f"{unequal} unequal",
        )
    )
    bad += unequal
    # The samples of each cluster.
    with contextlib.redirect_stdout(io.StringIO()):
        counts = compare_clusters(1000)
    rows.append(
        (
            f"clusters: {counts['cases']} curricula of one or two metrics, {counts['clusters']:,} "
            f"clusters of {counts['samples']:,} samples",
            f"{counts['unequal']} unequal",
        )
    )
    rows.append(
        (
            f"  and {counts['nothing at step 1']} that admit nothing at step 1",
            "an error; upstream fails in numpy",
        )
    )
    bad += counts["unequal"]
    # The analysis of a corpus, and what a resumed run draws.
    for what, holds in compare_analysis(1000).items():
        rows.append((f"analysis of 1,000 samples: {what}", "yes" if holds else "NO"))
        bad += not holds
    cases, theirs, ours = resumed_draws(20)
    rows.append(
        (
            f"resumed at step 20, {cases} curricula: went on with other samples",
            f"DeepSpeed {theirs}, here {ours}",
        )
    )
    bad += ours
    # The report.
    print(f"deepspeed {deepspeed.__version__}")
    for what, result in rows:
        print(f"{what:<100} {result}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
