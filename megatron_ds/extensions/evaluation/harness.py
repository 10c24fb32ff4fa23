"""Tasks of lm-evaluation-harness, an optional package, on a model of any layout."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from ...config import RunConfig
from ...data.tokenizers import Tokenizer
from ...errors import ConfigError
from ...mpu.agree import on_one_rank
from ...mpu.mesh import Mesh
from ...training.build import Replica
from ..generation.model_text import end_tokens
from .bundled_tasks import BUNDLED
from .leading_rank import Score, lead
from .scorer import Scorer

Results = dict[str, dict[str, Any]]
PACKAGE = "lm_eval"
NAMES_SHOWN = 8
# The seed of the harness's command, so that examples are the same.
FEWSHOT_SEED = 1234


@dataclass(frozen=True)
class HarnessTasks:
    """names: of tasks, groups or tags, with * for any text. include_path: folder of further YAML files.

    bootstrap  resamples for the standard errors of metrics that are no means; 0: no standard errors
    """

    names: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    bootstrap: int = 0


def check_harness() -> None:
    """Raises ConfigError where the package is not installed."""
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            "tasks of lm-evaluation-harness need the package lm_eval, which is not installed. "
            "Install it with pip install megatron_ds[eval]."
        )


def check_outputs(config: RunConfig, mesh: Mesh) -> None:
    """Raises ConfigError on rank 0 where --eval-tasks needs the package, and it is not installed."""
    if mesh.rank == 0 and config.train.eval_tasks:
        check_harness()


class HarnessRun:
    """Tasks that are loaded once, on rank 0, and evaluated as often as asked.

    Making it is collective over the world. Its errors, such as that of an unknown task, are raised on all
    ranks. The state of random generators stays as it is.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, wanted: HarnessTasks):
        self.scorer = scorer
        self.tokenizer = tokenizer
        self.wanted = wanted
        self._loaded: dict[str, Any] = {}  # on rank 0
        on_one_rank(scorer.world, self._load)

    def results(self) -> Results:
        """Return the metrics of each task and group, by name. Collective over the world; rank 0 runs the harness."""
        return lead(self.scorer, self._evaluate)

    def _load(self) -> None:
        check_harness()
        with kept_random_states():
            self._loaded = _tasks(self.wanted)

    def _evaluate(self, score: Score) -> Results:
        from lm_eval.evaluator import evaluate

        from .harness_model import HarnessModel

        ends = end_tokens(self.tokenizer, self.scorer.replica.config.data)
        # A seed makes the examples the same each time.
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        with kept_random_states():
            found = evaluate(
                HarnessModel(score, self.tokenizer, self.scorer.max_length, ends),
                self._loaded,
                limit=self.wanted.limit,
                bootstrap_iters=self.wanted.bootstrap,
                log_samples=False,
            )
        return {name: _numbers(values) for name, values in found["results"].items()}


def harness_of_run(replica: Replica, tokenizer: Tokenizer) -> HarnessRun:
    """Return the tasks of --eval-tasks. Collective over the world."""
    train = replica.config.train
    wanted = HarnessTasks(
        train.eval_tasks,
        train.eval_tasks_include_path,
        train.eval_tasks_num_fewshot,
        train.eval_tasks_limit,
    )
    return HarnessRun(Scorer(replica), tokenizer, wanted)


def _tasks(wanted: HarnessTasks) -> dict[str, Any]:
    """Return the loaded tasks, with the examples of `num_fewshot` unless a task allows none."""
    manager, names = _found(wanted)
    loaded = manager.load(names)
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (wanted.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=wanted.num_fewshot or 0)
    return loaded


def _found(wanted: HarnessTasks) -> tuple[Any, list[Any]]:
    """(manager of tasks, what it loads). To index the package's own thousands of files takes many seconds, so
    they are left out where the other tasks have all names. Raises ConfigError for an unknown name."""
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import pattern_match

    missing: list[str] = []
    for with_defaults in (False, True):
        manager = TaskManager(
            include_path=wanted.include_path, include_defaults=with_defaults
        )
        known = manager.all_tasks
        names: list[Any] = []
        missing = []
        for name in wanted.names:
            of_name = pattern_match([name], known)
            if name in BUNDLED:
                of_name = [BUNDLED[name]()]
            names += of_name
            missing += [] if of_name else [name]
        if not missing:
            return manager, names
    similar = pattern_match([f"*{missing[0][:4]}*"], known)[:NAMES_SHOWN]
    raise ConfigError(
        f"{PACKAGE} has no task {missing[0]!r}. Similar: {', '.join(similar) or 'none'}; bundled here: "
        f"{', '.join(BUNDLED)}. --include-path adds a folder of YAML files."
    )


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a task, "acc" for "acc,none", without standard errors that were not computed."""
    return {
        name.removesuffix(",none").replace(",", " "): value
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Restore the states of the generators of Python, numpy and torch when the block ends."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
