"""The difficulty of each sample: map over shards of the dataset, then reduce to index files.

    {save}/{metric}/worker{i}_thread0/     of shard i: {metric}_sample_to_metric, or {metric}_metric_value,
                                           and done.json
    {save}/{metric}/                       of all: the index files, and analysis.json

The two .json describe the inputs of the other files and are written last, so a folder with one is complete:
complete shards are not computed again. Folders and ranges are those of DeepSpeed's DataAnalyzer with as many
workers.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ...config import RunConfig
from ...data.kind import DataKind, Dataset
from ...data.loading.datasets import identify
from ...data.loading.sources import read_sources
from ...data.text.indexed import replacing
from ...errors import DataError
from ...host.regular_file import read_text
from .difficulty_metrics import (
    FULL_DISK,
    ListFile,
    MetricSpec,
    write_list_file,
    write_metric,
    write_total,
)

logger = logging.getLogger(__name__)
BATCH = 256  # samples measured together: bounds the memory of a map
Values = dict[str, np.ndarray]


def identity(config: RunConfig, kind: DataKind, total: int) -> dict:
    """All that the indices of the samples of an epoch depend on."""
    sources = read_sources(config.data)
    values = (sources.whole or sources.parts[0]).values
    return {
        "data": identify(values),
        "split": config.data.splits if sources.whole else None,
        "seq_length": config.model.seq_length,
        "seed": config.train.seed,
        "samples": total,
        **kind.identity(config),
    }


def describes(description: Mapping, wanted: Mapping) -> str:
    """Return the differences of a description from `wanted`, for messages; "" if there are none."""
    found = description.get("dataset", {})
    differing = [key for key, value in wanted.items() if found.get(key) != value]
    return ", ".join(
        f"{key} {found.get(key)!r} instead of {wanted[key]!r}" for key in differing
    )


def read_description(folder: Path, name: str = "analysis.json") -> dict | None:
    """Return the description of the files of a folder; None if there is none."""
    try:
        return json.loads(read_text(folder / name, DataError))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise DataError(
            f"{folder / name} cannot be read: {error}. Remove it, and run megatron-ds analyze "
            "again."
        ) from None


def _write_json(path: Path, description: Mapping) -> None:
    with replacing(path, FULL_DISK) as file:
        file.write(json.dumps(description, indent=1).encode())


def map_shard(
    dataset: Dataset,
    save: Path,
    shard: int,
    num_shards: int,
    specs: Sequence[MetricSpec],
    dataset_id: Mapping,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Compute the missing metrics of a shard; returns their names.  progress: called with samples done.

    Raises DataError for a metric that fails, naming it and the samples, and for a full disk.
    """
    # The same shards as DeepSpeed's.
    bounds = np.linspace(0, dataset_id["samples"], num_shards + 1, dtype=int)
    first, last = bounds[shard : shard + 2].tolist()
    # Finished metrics of an earlier run are kept.
    todo = [
        spec
        for spec in specs
        if not _is_mapped(save, spec, dataset_id, shard, num_shards)
    ]
    if not todo:
        return []
    descriptions = [
        _description(save, spec, dataset_id, shard, num_shards) for spec in todo
    ]
    columns: dict[str, list[np.ndarray]] = {spec.name: [] for spec in todo}
    functions = {spec.name: spec.function(save) for spec in todo}
    # The samples are read once for all metrics. A total keeps a sum, a metric the values of each sample.
    for start, samples in _batches(dataset, first, last):
        for spec in todo:
            column = columns[spec.name]
            values = _call(functions[spec.name], spec, samples, start)
            column[:] = (
                [column[0] + values] if spec.is_total and column else [*column, values]
            )
        progress(start + len(next(iter(samples.values()))) - first)
    # done.json comes last: a shard without it is computed again.
    for spec, description in zip(todo, descriptions):
        folder = shard_folder(save, spec.name, shard)
        (folder / "done.json").unlink(missing_ok=True)
        values = (
            np.concatenate(columns[spec.name])
            if columns[spec.name]
            else np.empty(0, np.int64)
        )
        if spec.is_total:
            write_list_file(folder / f"{spec.name}_metric_value", values, [len(values)])
        else:
            write_list_file(
                folder / f"{spec.name}_sample_to_metric",
                values,
                np.ones(len(values), np.int64),
            )
        _write_json(folder / "done.json", description)
    return [spec.name for spec in todo]


def reduce_metric(
    save: Path, spec: MetricSpec, num_shards: int, dataset_id: Mapping
) -> np.ndarray:
    """Merge the shards of a metric into its index files; returns its values or totals. Raises DataError."""
    folder = save / spec.name
    prefix = save / spec.name / spec.name
    description = _description(save, spec, dataset_id)
    # All shards must be complete and of this dataset.
    missing = [
        shard
        for shard in range(num_shards)
        if not _is_mapped(save, spec, dataset_id, shard, num_shards)
    ]
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} of {num_shards} shards are not complete, or were made "
            f"from other data: {', '.join(map(str, missing[:10]))}{' …' if len(missing) > 10 else ''}. "
            "Run the map again: finished shards are kept."
        )
    # Totals of shards are added, values of samples are joined.
    what = "metric_value" if spec.is_total else "sample_to_metric"
    parts = [
        ListFile(shard_folder(save, spec.name, shard) / f"{spec.name}_{what}").flat
        for shard in range(num_shards)
    ]
    values = (
        np.sum([part for part in parts if len(part)], axis=0)
        if spec.is_total
        else np.concatenate(parts)
    )
    if not spec.is_total and len(values) != dataset_id["samples"]:
        raise DataError(
            f"{folder}: the shards hold {len(values)} values for {dataset_id['samples']} "
            "samples. Remove the folder, and run the map again."
        )
    # The description comes last: an interrupted run leaves none.
    (folder / "analysis.json").unlink(missing_ok=True)
    (write_total if spec.is_total else write_metric)(prefix, values)
    _write_json(folder / "analysis.json", description)
    return values


def is_reduced(save: Path, spec: MetricSpec, dataset_id: Mapping) -> bool:
    """Return whether the index files of the metric are complete and of this dataset."""
    return read_description(save / spec.name) == _description(save, spec, dataset_id)


def _is_mapped(
    save: Path, spec: MetricSpec, dataset_id: Mapping, shard: int, num_shards: int
) -> bool:
    found = read_description(shard_folder(save, spec.name, shard), "done.json")
    return found == _description(save, spec, dataset_id, shard, num_shards)


def _description(
    save: Path, spec: MetricSpec, dataset_id: Mapping, *shard: int
) -> dict:
    """Return what the index files were made from. shard: number of a shard and number of shards, for its files."""
    return {
        "metric": spec.definition(save),
        "dataset": dict(dataset_id),
        **dict(zip(("shard", "num_shards"), shard)),
    }


def shard_folder(save: Path, metric: str, shard: int) -> Path:
    """Return the folder of a shard's files, with DeepSpeed's name."""
    return save / metric / f"worker{shard}_thread0"


def percentiles(values: np.ndarray) -> str:
    """`5 % 12 | 25 % 15 | …`: the value that this share of the samples does not exceed."""
    ordered = np.sort(values)
    return " | ".join(
        f"{p} % {ordered[max(0, -(-len(ordered) * p // 100) - 1)]}"
        for p in (5, 25, 50, 75, 95, 100)
    )


def _batches(dataset: Dataset, first: int, last: int) -> Iterator[tuple[int, Values]]:
    for start in range(first, last, BATCH):
        samples = [dataset[i] for i in range(start, min(last, start + BATCH))]
        yield (
            start,
            {
                name: np.stack([sample[name] for sample in samples])
                for name in samples[0]
            },
        )


def _call(
    function: Callable[[Values], np.ndarray],
    spec: MetricSpec,
    samples: Values,
    start: int,
) -> np.ndarray:
    """Return the values of a metric for these samples, int64."""
    count = len(next(iter(samples.values())))
    try:
        values = np.asarray(function(samples))
    except Exception as error:
        raise DataError(
            f"metric {spec.name} failed on samples {start} to {start + count - 1}: "
            f"{type(error).__name__}: {error}."
        ) from error
    if values.dtype.kind not in "iu" or not spec.is_total and values.shape != (count,):
        raise DataError(
            f"metric {spec.name} gave {values.dtype} {list(values.shape)} for {count} samples: "
            f"it must give integers, one for each sample ([{count}]). Round them, as in (1000 * "
            "x).astype(numpy.int64)."
        )
    return values.astype(np.int64)
