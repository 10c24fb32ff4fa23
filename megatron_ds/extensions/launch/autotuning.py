"""`megatron-ds launch --autotuning tune|run SCRIPT … --deepspeed_config FILE`: short trials of a program that
uses an engine, with changed JSON, as DeepSpeed's launcher makes them.

    autotuning_exps/z1_gas1_tmbspg4.json       the settings of a trial
    autotuning_results/z1_gas1_tmbspg4/        its ds_config.json, cmd.txt, metrics.json and output
    autotuning_results/summary.txt             all trials and the best one
    autotuning_results/ds_config_optimal.json  the JSON of the best one, and cmd_optimal.txt, its command

A trial has a ZeRO stage (those of the JSON, "all" for 0 to 3) and a size of micro-batches, which doubles from
the smallest until a trial fails, until it would need more memory than the device has, or until the metric gets
less than 5 % better. `run` starts the program with the best JSON at the end; `tune` does not.

That is "tuner_type": "gridsearch". With "random" and "model_based" the trials of all stages have an order of their own
(trial_order.py). A trial that fails leaves out the larger micro-batches of its stage, and the search ends after
"tuner_early_stopping" trials of which none was the best so far.

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
from itertools import product
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...features import Provided, missing_wings
from .trial_order import CHOICES

FOREIGN_JSON: Provided[Any] = Provided("foreign json")

MODES = ("tune", "run")
FLAGS = ("--deepspeed_config", "--deepspeed")  # before the path of the JSON
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
STAGES = (0, 1, 2, 3)
STEP_KEYS = ("start_profile_step", "end_profile_step")
LEAST_GAIN = 0.05
TUNERS = ("gridsearch", *CHOICES)
MOST = 50  # trials, as in DeepSpeed
PATIENCE = 5  # trials in a row of which none is the best, as in DeepSpeed
# metric → its name in the file of numbers, and whether more is better
METRICS = {
    "throughput": ("throughput", True),
    "latency": ("latency", False),
    "flops": ("FLOPS_per_gpu", True),
}
BYTES = 16  # of a parameter: weight, gradient and two moments in fp32
SHARDED = (0, 8, 12, BYTES)  # those of them that each stage shards


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
class TunedProgram:
    """A program to tune: the launcher's own words, and the script with its arguments, among them the path of a JSON."""

    own: Sequence[str]
    words: Sequence[str]
    at: int
    config: Mapping[str, Any]

    @property
    def tuning(self) -> Mapping[str, Any]:
        """The block "autotuning"."""
        return self.config.get("autotuning") or {}

    def command(self, path: Path, settings: Mapping[str, Any]) -> list[str]:
        """Return the words that start the program with another JSON, and with the flags of "arg_mappings"."""
        words = list(self.words)
        words[self.at] = str(path)
        for key, flag in (self.tuning.get("arg_mappings") or {}).items():
            if key in settings and flag in words[:-1]:
                words[words.index(flag) + 1] = str(settings[key])
            elif key in settings:
                words += [flag, str(settings[key])]
        return [sys.executable, "-m", "megatron_ds.launch", *self.own, *words]


def program_of(own: Sequence[str], words: Sequence[str]) -> TunedProgram:
    """Return the program of a command line. Raises ConfigError where no JSON is named."""
    for flag in FLAGS:
        if flag not in words[:-1]:
            continue
        at = words.index(flag) + 1
        path = words[at]
        if not path.startswith("-"):
            return TunedProgram(own, words, at, _loaded(path, flag))
    raise ConfigError(
        "--autotuning changes the JSON of a program, and the command names none: add --deepspeed_config FILE to the "
        "arguments of the script."
    )


def _loaded(path: str, flag: str) -> Mapping[str, Any]:
    load_json = FOREIGN_JSON.find()
    if load_json is None:
        raise ConfigError(f"{flag} is not read here.{missing_wings()}")
    return load_json(path, flag)


def autotune(
    program: TunedProgram, mode: str, say: Callable[[str], None] = print
) -> int:
    """Make the trials. Return the exit code of the program with the best JSON in mode "run", else 0.

    Raises ConfigError for a wrong mode or block, for folders that are not to be overwritten, and where no trial
    succeeds.
    """
    metric = _metric(program, mode)
    tuner = _tuner(program)
    results, exps = _folders(program.tuning)
    if tuner in CHOICES:
        trials = _in_order(program, tuner, (results, exps), metric, say)
    else:
        trials = []
        for stage in _stages(program.config):
            trials += _of_stage(program, stage, trials, (results, exps), metric, say)
    done = [trial for trial in trials if trial.numbers]
    if not done:
        raise ConfigError(
            f"autotuning: none of the {len(trials)} trials succeeded. Their output is in {results}; start with the "
            "stderr.log of the first."
        )
    # The best settings stay in a folder, so that they can be used without another search.
    best = max(done, key=lambda trial: score(trial, metric))
    settings = settings_of(program, best)
    settings.pop("autotuning", None)
    path = results / "ds_config_optimal.json"
    _write(path, json.dumps(settings, indent=2))
    command = program.command(path.resolve(), settings)
    _write(results / "cmd_optimal.txt", shlex.join(command))
    lines = summary_lines(trials, best, metric)
    summary = "\n".join(lines)
    _write(results / "summary.txt", summary)
    say(summary)
    return subprocess.run(command).returncode if mode == "run" else 0


def plan_lines(program: TunedProgram, mode: str) -> Iterator[str]:
    """Return what `autotune` would do, for --dry-run: no trial is started, and no folder is touched.

    program  as for `autotune`
    mode     "tune" or "run"

    Raises ConfigError as `autotune` does.
    """
    metric = _metric(program, mode)
    results, exps = _places(program.tuning)
    steps = _steps(program.config)
    yield f"--autotuning {mode} would make these trials; --dry-run starts none:"
    # Only the limits in the JSON apply here: the number of ranks, by which the batch
    # grows, is known after the first trial.
    largest = program.tuning.get("max_train_batch_size")
    sizes = [
        size
        for size in _micro_batches(program)
        if largest is None or size * steps <= largest
    ]
    if not sizes:
        raise ConfigError(
            f'"autotuning.max_train_batch_size" is {largest}, less than the smallest batch. Give a larger one.'
        )
    stages = _stages(program.config)
    for stage in stages:
        shown = ", ".join(map(str, sizes))
        yield f"  ZeRO stage {stage}: micro-batches of {shown} samples, {steps} of them in an update"
    most = program.tuning.get("tuner_num_trials", MOST)
    tuner = _tuner(program)
    if tuner in CHOICES:
        yield f"  at most {most} trials, by {tuner}, until {_patience(program)} in a row are not the best"
    else:
        yield f"  at most {most} trials; a stage ends where a trial fails, where the next would not fit the device, or"
        yield f"  where {metric} gets less than {LEAST_GAIN:.0%} better"
    # The command of the first trial has the path of a JSON that only
    # a search would write.
    yield f"results in {results}, settings in {exps}; trials of an earlier search there are removed"
    first = Trial(stages[0], sizes[0], steps)
    path = (results / first.name / "ds_config.json").resolve()
    command = program.command(path, settings_of(program, first))
    yield f"the first trial: {shlex.join(command)}"
    if mode == "run":
        yield f"then the program with {results / 'ds_config_optimal.json'}"


def _metric(program: TunedProgram, mode: str) -> str:
    """Return the metric of the search. Raises ConfigError for an unknown metric or mode."""
    if mode not in MODES:
        raise ConfigError(f"--autotuning {mode}: give {' or '.join(MODES)}.")
    metric = program.tuning.get("metric", "throughput")
    if metric not in METRICS:
        raise ConfigError(
            f'"autotuning.metric" is {metric!r}; it must be one of {", ".join(METRICS)}.'
        )
    return metric


def _tuner(program: TunedProgram) -> str:
    """Return how trials are chosen. Raises ConfigError for an unknown name."""
    tuner = program.tuning.get("tuner_type", "gridsearch")
    if tuner not in TUNERS:
        raise ConfigError(
            f'"autotuning.tuner_type" is {tuner!r}; it must be one of {", ".join(TUNERS)}.'
        )
    return tuner


def _patience(program: TunedProgram) -> int:
    return program.tuning.get("tuner_early_stopping", PATIENCE)


def settings_of(program: TunedProgram, trial: Trial) -> dict[str, Any]:
    """Return the JSON of a trial, without the path of its numbers."""
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
    """Return the metric, negative where less is better."""
    name, is_more = METRICS[metric]
    value = trial.numbers[name]
    if not is_more:
        return -value
    return value


def fits(trial: Trial, measured: Sequence[Trial], ranks: int) -> bool:
    """Return whether a trial is expected to fit the device, from the memory of one that was measured.

    The state follows from the parameters and the stage; the rest grows with the micro-batch.
    """
    found = [each for each in measured if "memory" in each.numbers]
    if not found:
        return True
    known = found[-1]
    parameters = known.numbers["num_params"]
    state = state_bytes(parameters, known.stage, ranks)
    rest = max(0.0, known.numbers["memory"] - state)
    wanted = state_bytes(parameters, trial.stage, ranks)
    times = trial.micro / known.micro
    wanted += rest * times
    return wanted <= known.numbers["memory_of_device"]


def state_bytes(parameters: float, stage: int, ranks: int) -> float:
    """Bytes of a rank for weights, gradients and moments in fp32, of which a stage shards some."""
    sharded = SHARDED[stage]
    whole = BYTES - sharded
    return parameters * (whole + sharded / ranks)


def summary_lines(trials: Sequence[Trial], best: Trial, metric: str) -> Iterator[str]:
    """Yield a table of all trials."""
    name, _ = METRICS[metric]
    yield f"| trial | {metric} |"
    yield "|:---|---:|"
    for trial in trials:
        value = "failed"
        if trial.numbers:
            value = f"{trial.numbers[name]:.6g}"
        yield f"| {trial.name} | {value} |"
    yield f"the best of {len(trials)} trials: {best.name}"


def _of_stage(
    program: TunedProgram,
    stage: int,
    before: Sequence[Trial],
    folders: tuple[Path, Path],
    metric: str,
    say: Callable[[str], None],
) -> list[Trial]:
    made: list[Trial] = []
    tuning = program.tuning
    most = tuning.get("tuner_num_trials", MOST)
    is_listed = isinstance(program.config.get(MICRO), list)
    for micro in _micro_batches(program):
        # A micro-batch is tried only within the limits, and if it is expected to fit.
        trial = Trial(stage, micro, _steps(program.config))
        earlier = [*before, *made]
        ranks = _ranks(earlier)
        samples = micro * trial.steps * ranks
        largest = tuning.get("max_train_batch_size") or samples
        if len(earlier) >= most or samples > largest:
            break
        if not fits(trial, earlier, ranks):
            say(f"autotuning: {trial.name} is left out: it would not fit the device")
            break
        # The sizes grow, so a failed trial, or one that is not better, ends the search of the stage.
        trial.numbers = _run(program, trial, *folders)
        name, _ = METRICS[metric]
        value = trial.numbers.get(name, "failed")
        say(f"autotuning: {trial.name}: {metric} {value}")
        made.append(trial)
        if not trial.numbers:
            break
        if is_listed or len(made) < 2:
            continue
        if not _is_better(made[-2], made[-1], metric):
            break
    return made


def _in_order(
    program: TunedProgram,
    tuner: str,
    folders: tuple[Path, Path],
    metric: str,
    say: Callable[[str], None],
) -> list[Trial]:
    """Make the trials that the tuner chooses, one after the other, and return them."""
    tuning = program.tuning
    steps = _steps(program.config)
    places = product(_stages(program.config), _micro_batches(program))
    left = [Trial(stage, micro, steps) for stage, micro in places]
    made: list[Trial] = []
    best: Trial | None = None
    without_gain = 0
    # Each choice knows what was measured before it.
    while left and len(made) < tuning.get("tuner_num_trials", MOST):
        measured = [trial for trial in made if trial.numbers]
        trial = left.pop(CHOICES[tuner](left, measured, metric))
        ranks = _ranks(made)
        largest = tuning.get("max_train_batch_size")
        too_large = largest and trial.micro * steps * ranks > largest
        if too_large or not fits(trial, made, ranks):
            say(f"autotuning: {trial.name} is left out: {_why(bool(too_large))}")
            left = _smaller(left, trial)
            continue
        trial.numbers = _run(program, trial, *folders)
        name, _ = METRICS[metric]
        say(f"autotuning: {trial.name}: {metric} {trial.numbers.get(name, 'failed')}")
        made.append(trial)
        if not trial.numbers:
            left = _smaller(left, trial)
            continue
        # A search that finds nothing better ends.
        without_gain += 1
        if best is None or score(trial, metric) > score(best, metric):
            best = trial
            without_gain = 0
        if without_gain >= _patience(program):
            break
    return made


def _why(too_large: bool) -> str:
    return "its batch is too large" if too_large else "it would not fit the device"


def _smaller(left: Sequence[Trial], failed: Trial) -> list[Trial]:
    """Return the trials without those of the same stage whose micro-batches are larger."""
    return [
        trial
        for trial in left
        if trial.stage != failed.stage or trial.micro < failed.micro
    ]


def _ranks(trials: Sequence[Trial]) -> int:
    """Return the ranks of the trials so far; 1 before the first, and of programs that do not measure them."""
    found = [trial.numbers.get("ranks", 1) for trial in trials]
    return int(max(found, default=1))


def _is_better(old: Trial, new: Trial, metric: str) -> bool:
    before = score(old, metric)
    after = score(new, metric)
    least = LEAST_GAIN * abs(before)
    return after > before + least


def _run(
    program: TunedProgram, trial: Trial, results: Path, exps: Path
) -> dict[str, float]:
    """Run a trial. Return its numbers, empty if it failed."""
    # The trial gets a JSON of its own, which stays for the user.
    folder = results / trial.name
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "ds_config.json").resolve()
    numbers = (folder / "metrics.json").resolve()
    settings = settings_of(program, trial)
    block = {"enabled": True, "metric_path": str(numbers)}
    for key in STEP_KEYS:
        if key in program.tuning:
            block[key] = program.tuning[key]
    settings["autotuning"] = block
    text = json.dumps(settings, indent=2)
    _write(path, text)
    _write(exps / f"{trial.name}.json", text)
    # The command is kept, so that the user can repeat the trial.
    command = program.command(path, settings)
    _write(folder / "cmd.txt", shlex.join(command))
    out_path = folder / "stdout.log"
    err_path = folder / "stderr.log"
    with out_path.open("w") as out, err_path.open("w") as err:
        done = subprocess.run(command, stdout=out, stderr=err)
    if done.returncode or not numbers.is_file():
        return {}
    return json.loads(numbers.read_text(encoding="utf-8"))


def _folders(tuning: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return the folders of results and of settings, empty. Raises ConfigError where they may not be overwritten."""
    folders = _places(tuning)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("z?_gas*_tmbspg*"):
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink()
    return folders


def _places(tuning: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return the folders of results and of settings. Raises ConfigError where they may not be overwritten."""
    results = tuning.get("results_dir") or "autotuning_results"
    exps = tuning.get("exps_dir") or "autotuning_exps"
    folders = Path(results), Path(exps)
    for folder in folders:
        if folder.exists() and not tuning.get("overwrite", True):
            raise ConfigError(
                f'autotuning: {folder} exists, and "autotuning.overwrite" is false. Move it, or choose another one.'
            )
    return folders


def _stages(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the stages of the JSON: one, a list, or "all". Raises ConfigError."""
    block = config.get("zero_optimization", {})
    stage = block.get("stage", 0)
    stages = stage if isinstance(stage, list) else [stage]
    if stage == "all":
        return STAGES
    if wrong := [each for each in stages if each not in STAGES]:
        raise ConfigError(
            f'"zero_optimization.stage" is {wrong[0]!r}; it must be 0 to 3, a list of these, or "all".'
        )
    return tuple(stages)


def _micro_batches(program: TunedProgram) -> list[int]:
    """Return the sizes that are tried, in order. Raises ConfigError for sizes that are not numbers."""
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
    if not isinstance(steps, int):
        return 1
    return steps


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
