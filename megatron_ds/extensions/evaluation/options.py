"""Options of benchmarks that are evaluated during a training."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option

WITH_TASKS = need("train.eval_tasks")


@dataclass(frozen=True)
class TaskOptions:
    """Tasks of lm-evaluation-harness, which rank 0 runs and all ranks compute."""

    eval_tasks: tuple[str, ...] = option(
        (),
        separators=",",
        help="Tasks of lm-evaluation-harness (pip install megatron_ds[eval]) that are evaluated at the end of "
        "the run, and every --eval-tasks-interval steps. Losses are the same to the last bit with and without.",
    )
    eval_tasks_interval: int | None = option(
        None,
        at_least=1,
        unit="iterations",
        needs=WITH_TASKS,
        help="Steps between evaluations of --eval-tasks. Default: one at the end of the run.",
    )
    eval_tasks_include_path: str | None = option(
        None,
        per_host=True,
        needs=WITH_TASKS,
        help="Folder with YAML files of further tasks. The harness runs Python functions that they name.",
    )
    eval_tasks_num_fewshot: int | None = option(
        None,
        at_least=0,
        needs=WITH_TASKS,
        help="Examples before each question. Default: those of the task.",
    )
    eval_tasks_limit: int | None = option(
        None,
        at_least=1,
        unit="documents",
        needs=WITH_TASKS,
        help="Evaluate only the first documents of each task.",
    )
