"""A corpus made in shards, at the same time here or on the machines of a Ray cluster, and merged.

Each shard is a task of its own that needs nothing of the others, is done or not done, and is not done twice: a command that
was killed goes on where it was. The shards lie beside the output until they are merged.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from ...errors import ConfigError, DataError
from .corpus_merge import merge
from .corpus_record import record_path
from .indexed import corpus_paths
from .orphans import end_with_parent
from .preprocess import Shard, Written, output_prefix, shard_prefix
from .table_files import needs

Task = Callable[..., Written]                               # task(shard=(i, n)); is sent away, so it must pickle
Run = Callable[[Task, int], Iterator[Written]]              # does task for each of n shards, in any order


def run_here(task: Task, count: int) -> Iterator[Written]:
    """Each shard in a process of its own, all at once."""
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), end_with_parent, (os.getpid(),))
    try:
        for future in as_completed([pool.submit(task, shard=(i, count)) for i in range(count)]):
            yield future.result()
    except BrokenProcessPool:
        raise DataError("a process was killed, perhaps because memory ran out. Finished shards are kept: the same command "
                        "continues from there. Use fewer --partitions.") from None
    finally:
        pool.shutdown(cancel_futures=True)


def run_on_ray(task: Task, count: int, address: str | None = None, cores: int = 1) -> Iterator[Written]:
    """Each shard as a Ray task of so many cores; files must have the same names on all machines."""
    try:
        import ray
    except ImportError as e:
        raise needs("ray", "ray", "--ray", e) from None
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, ValueError) as e:
        raise ConfigError(f"--ray {address}: {e}. Give the address of a running cluster, or local.") from None
    remote = ray.remote(num_cpus=cores, max_retries=3)(_quietly)
    waiting = [remote.remote(task, (i, count)) for i in range(count)]
    while waiting:
        ready, waiting = ray.wait(waiting)
        for written in ray.get(ready):
            if isinstance(written, str):
                raise DataError(written)
            yield written


def _quietly(task: Task, shard: Shard) -> Written | str:
    """What is wrong with the input is wrong again in a second try, so it is no failure to Ray."""
    try:
        return task(shard=shard)
    except DataError as error:
        return str(error)


def preprocess_in_shards(task: Task, count: int, prefix: str, keys: Sequence[str], *, run: Run = run_here,
                         sentences: bool = False, workers: int = 1,
                         done: Callable[[Written], None] = lambda written: None) -> Written:
    """All shards, then `{prefix}_{key}_document` for each key; the shards are removed when all keys are merged.

    done: called with each shard's sums.  Raises DataError for the first shard that fails; finished ones are kept.
    """
    total = Written()
    for written in run(task, count):
        done(written)
        total.documents += written.documents
        total.tokens += written.tokens
        total.num_bad += written.num_bad
        total.bad += written.bad[:10 - len(total.bad)]
    if not total.documents:
        remove_shards(prefix, keys, count, sentences)
        raise DataError(f"not one document{' is left' if total.num_bad else ''}. Nothing was written.")
    for key in keys:
        merge(shards_of(prefix, key, count, sentences), output_prefix(prefix, key, sentences), workers=workers)
    remove_shards(prefix, keys, count, sentences)
    return total


def shards_of(prefix: str, key: str, count: int, sentences: bool = False) -> list[str]:
    return [output_prefix(shard_prefix(prefix, (i, count)), key, sentences) for i in range(count)]


def remove_shards(prefix: str, keys: Sequence[str], count: int, sentences: bool) -> None:
    for name in (name for key in keys for name in shards_of(prefix, key, count, sentences)):
        for path in (record_path(name), *reversed(corpus_paths(name))):
            path.unlink(missing_ok=True)
