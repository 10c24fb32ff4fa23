"""`megatron-ds launch --autotuning tune|run SCRIPT … --deepspeed_config FILE`: short trials of a program that
uses an engine, with changed JSON, as DeepSpeed's launcher makes them.

    autotuning_exps/z1_gas1_tmbspg4.json       the settings of a trial
    autotuning_results/z1_gas1_tmbspg4/        its ds_config.json, cmd.txt, metrics.json and output
    autotuning_results/summary.txt             all trials and the best one
    autotuning_results/ds_config_optimal.json  the JSON of the best one, and cmd_optimal.txt, its command

A trial has a ZeRO stage (those of the JSON, "all" for 0 to 3) and a size of micro-batches, which doubles from
the smallest until a trial fails, until it would need more memory than the device has, or until the metric gets
less than 5 % better. `run` starts the program with the best JSON at the end; `tune` does not.

"autotuning.fast": false searches nothing more: bucket sizes change the speed little, and are not tried.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...compat.config.deepspeed_json import load_json
from ...errors import ConfigError

MODES = ("tune", "run")
FLAGS = ("--deepspeed_config", "--deepspeed")  # before the path of the JSON
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
STAGES = (0, 1, 2, 3)
LEAST_GAIN = 0.05
# metric → its name in the file of numbers, and whether more is better
METRICS = {
    "throughput": ("throughput", True),
    "latency": ("latency", False),
    "flops": ("FLOPS_per_gpu", True),
}
BYTES = 4 + 4 + 8  # of a parameter: weight, gradient and two moments in fp32


@dataclass
class Trial:
    """A stage and a micro-batch, and what was measured; `numbers` is empty where the trial failed."""

    stage: int
    micro: int
    steps: int
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name as DeepSpeed gives it."""
        return f"z{self.stage}_gas{self.steps}_tmbspg{self.micro}"


@dataclass(frozen=True)
class Program:
    """The launcher's own words, and the script with its arguments, one of which is the path of a JSON."""

    own: Sequence[str]
    words: Sequence[str]
    at: int
    config: Mapping[str, Any]

    @property
    def tuning(self) -> Mapping[str, Any]:
        """The block "autotuning"."""
        return self.config.get("autotuning") or {}

    def command(self, path: Path, settings: Mapping[str, Any]) -> list[str]:
        """The words that start the program with another JSON, and with the flags of "arg_mappings"."""
        words = list(self.words)
        words[self.at] = str(path)
        for key, flag in (self.tuning.get("arg_mappings") or {}).items():
            if key in settings and flag in words[:-1]:
                words[words.index(flag) + 1] = str(settings[key])
            elif key in settings:
                words += [flag, str(settings[key])]
        return [sys.executable, "-m", "megatron_ds.launch", *self.own, *words]


def program_of(own: Sequence[str], words: Sequence[str]) -> Program:
    """The program of a command line. Raises ConfigError where no JSON is named."""
    for flag, at in ((flag, at) for flag in FLAGS for at in range(len(words) - 1)):
        if words[at] == flag and not words[at + 1].startswith("-"):
            path = words[at + 1]
            return Program(own, words, at + 1, load_json(path, flag))
    raise ConfigError(
        "--autotuning changes the JSON of a program, and the command names none: add --deepspeed_config FILE to the "
        "arguments of the script."
    )


def autotune(program: Program, mode: str, say: Callable[[str], None] = print) -> int:
    """Make the trials; the exit code of the program with the best JSON in mode "run", else 0.

    Raises ConfigError for a wrong mode or block, for folders that are not to be overwritten, and where no trial
    succeeds.
    """
    if mode not in MODES:
        raise ConfigError(f"--autotuning {mode}: give {' or '.join(MODES)}.")
    metric = program.tuning.get("metric", "throughput")
    if metric not in METRICS:
        raise ConfigError(
            f'"autotuning.metric" is {metric!r}; it must be one of {", ".join(METRICS)}.'
        )
    # The trials of each stage.
    results, exps = _folders(program.tuning)
    trials: list[Trial] = []
    for stage in _stages(program.config):
        trials += _of_stage(program, stage, trials, (results, exps), metric, say)
    done = [trial for trial in trials if trial.numbers]
    if not done:
        raise ConfigError(
            f"autotuning: none of the {len(trials)} trials succeeded. Their output is in {results}; start with the "
            "stderr.log of the first."
        )
    # The best one, and what leads to it.
    best = max(done, key=lambda trial: score(trial, metric))
    settings = settings_of(program, best)
    settings.pop("autotuning")
    path = results / "ds_config_optimal.json"
    _write(path, json.dumps(settings, indent=2))
    command = program.command(path.resolve(), settings)
    _write(results / "cmd_optimal.txt", shlex.join(command))
    summary = "\n".join(summary_lines(trials, best, metric))
    _write(results / "summary.txt", summary)
    say(summary)
    return subprocess.run(command).returncode if mode == "run" else 0


def settings_of(program: Program, trial: Trial) -> dict[str, Any]:
    """The JSON of a trial, without the path of its numbers."""
    settings = deepcopy(dict(program.config))
    settings.pop("train_batch_size", None)
    settings[MICRO] = trial.micro
    settings[STEPS] = trial.steps
    settings["zero_optimization"] = {
        **settings.get("zero_optimization", {}),
        "stage": trial.stage,
    }
    return settings


def score(trial: Trial, metric: str) -> float:
    """The metric, negative where less is better."""
    name, is_more = METRICS[metric]
    value = trial.numbers[name]
    return value if is_more else -value


def fits(trial: Trial, measured: Sequence[Trial], ranks: int) -> bool:
    """Whether a trial is expected to fit the device, from the memory of one that was measured.

    The state follows from the parameters and the stage; the rest grows with the micro-batch.
    """
    known = next((each for each in reversed(measured) if each.numbers), None)
    if known is None or "memory" not in known.numbers:
        return True
    parameters = known.numbers["num_params"]
    rest = max(
        0.0, known.numbers["memory"] - state_bytes(parameters, known.stage, ranks)
    )
    wanted = state_bytes(parameters, trial.stage, ranks)
    wanted += rest * trial.micro / known.micro
    return wanted <= known.numbers["memory_of_device"]


def state_bytes(parameters: float, stage: int, ranks: int) -> float:
    """Bytes of a rank for weights, gradients and moments in fp32, of which a stage shards some."""
    sharded = (0, 8, 12, BYTES)[stage]
    return parameters * (BYTES - sharded + sharded / ranks)


def summary_lines(trials: Sequence[Trial], best: Trial, metric: str) -> Iterator[str]:
    """A table of all trials."""
    name, _ = METRICS[metric]
    yield f"| trial | {metric} |"
    yield "|:---|---:|"
    for trial in trials:
        value = f"{trial.numbers[name]:.6g}" if trial.numbers else "failed"
        yield f"| {trial.name} | {value} |"
    yield f"the best of {len(trials)} trials: {best.name}"


def _of_stage(
    program: Program,
    stage: int,
    before: Sequence[Trial],
    folders: tuple[Path, Path],
    metric: str,
    say: Callable[[str], None],
) -> list[Trial]:
    made: list[Trial] = []
    most = program.tuning.get("tuner_num_trials", 50)
    is_listed = isinstance(program.config.get(MICRO), list)
    for micro in _micro_batches(program):
        trial = Trial(stage, micro, _steps(program.config))
        earlier = [*before, *made]
        if len(earlier) >= most:
            break
        ranks = int(
            next((t.numbers["ranks"] for t in earlier if "ranks" in t.numbers), 1)
        )
        if not fits(trial, earlier, ranks):
            say(f"autotuning: {trial.name} is left out: it would not fit the device")
            break
        trial.numbers = _run(program, trial, *folders)
        value = trial.numbers.get(METRICS[metric][0], "failed")
        say(f"autotuning: {trial.name}: {metric} {value}")
        made.append(trial)
        if not trial.numbers:
            break
        if not is_listed and len(made) > 1 and not _is_better(*made[-2:], metric):
            break
    return made


def _is_better(old: Trial, new: Trial, metric: str) -> bool:
    before = score(old, metric)
    return score(new, metric) - before > LEAST_GAIN * abs(before)


def _run(program: Program, trial: Trial, results: Path, exps: Path) -> dict[str, float]:
    """The numbers of a trial; empty where it failed."""
    folder = results / trial.name
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "ds_config.json").resolve()
    numbers = (folder / "metrics.json").resolve()
    settings = settings_of(program, trial)
    settings["autotuning"] = {
        "enabled": True,
        "metric_path": str(numbers),
        **{
            key: program.tuning[key]
            for key in ("start_profile_step", "end_profile_step")
            if key in program.tuning
        },
    }
    _write(path, json.dumps(settings, indent=2))
    _write(exps / f"{trial.name}.json", json.dumps(settings, indent=2))
    command = program.command(path, settings)
    _write(folder / "cmd.txt", shlex.join(command))
    with (
        (folder / "stdout.log").open("w") as out,
        (folder / "stderr.log").open("w") as err,
    ):
        code = subprocess.run(command, stdout=out, stderr=err).returncode
    if code or not numbers.is_file():
        return {}
    return json.loads(numbers.read_text(encoding="utf-8"))


def _folders(tuning: Mapping[str, Any]) -> tuple[Path, Path]:
    """The folders of results and of settings, empty. Raises ConfigError where they may not be overwritten."""
    folders = (
        Path(tuning.get("results_dir") or "autotuning_results"),
        Path(tuning.get("exps_dir") or "autotuning_exps"),
    )
    for folder in folders:
        if folder.exists() and not tuning.get("overwrite", True):
            raise ConfigError(
                f'autotuning: {folder} exists, and "autotuning.overwrite" is false. Move it, or choose another one.'
            )
    for folder in folders:
        for old in folder.glob("z?_gas*_tmbspg*") if folder.is_dir() else ():
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink()
        folder.mkdir(parents=True, exist_ok=True)
    return folders


def _stages(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The stages of the JSON: one, a list, or "all". Raises ConfigError."""
    stage = config.get("zero_optimization", {}).get("stage", 0)
    stages = STAGES if stage == "all" else stage if isinstance(stage, list) else [stage]
    if wrong := [each for each in stages if each not in STAGES]:
        raise ConfigError(
            f'"zero_optimization.stage" is {wrong[0]!r}; it must be 0 to 3, a list of these, or "all".'
        )
    return tuple(stages)


def _micro_batches(program: Program) -> list[int]:
    """The sizes that are tried, in order. Raises ConfigError for sizes that are not numbers."""
    given = program.config.get(MICRO)
    if isinstance(given, list):
        return given
    tuning = program.tuning
    size = tuning.get(f"min_{MICRO}", 1)
    largest = tuning.get(f"max_{MICRO}", 1024)
    if not isinstance(size, int) or not isinstance(largest, int) or size < 1:
        raise ConfigError(
            f'"autotuning.min_{MICRO}" is {size!r} and "max_{MICRO}" {largest!r}: give numbers of samples.'
        )
    sizes = []
    while size <= largest:
        sizes.append(size)
        size *= 2
    return sizes


def _steps(config: Mapping[str, Any]) -> int:
    steps = config.get(STEPS, 1)
    return steps if isinstance(steps, int) else 1


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
