"""Options of the log: its lines and its file of records."""

from dataclasses import dataclass

from .option import added_options, option


@dataclass(frozen=True)
class LoggingConfig(
    *added_options("logging"),  # type: ignore[misc]  # base classes are found at run time
):
    """Rank 0 writes the log."""

    log_interval: int = option(
        100,
        at_least=1,
        json="steps_per_print",
        unit="iterations",
        help="Steps between log lines.",
    )
    metrics_path: str | None = option(
        None,
        per_host=True,
        flags=["--metrics-jsonl"],
        help="File to which the record of each log line is appended as JSON. Default: metrics.jsonl in the "
        "--save directory, if there is one.",
    )
    log_num_zeros_in_grad: bool = option(
        False,
        help="Log the number of elements of the gradient that are exactly zero; as in Megatron, those "
        "of rows that pad the vocabulary count, so it depends on --tensor-model-parallel-size.",
        avoid="It reads the gradients once more in each step.",
    )
    progress_bar: bool = option(
        True,
        per_host=True,
        help="Show a progress bar while stdout is a terminal. Log files never contain one.",
        avoid="Turn it off where a recording of the terminal must hold plain lines.",
    )
