"""List what a recipe of Megatron-LM, Megatron-DeepSpeed or DeepSpeed would do here, without running it.

    megatron-ds check train.sh
    megatron-ds check ds_config.json model_config.yaml
    megatron-ds check train.sh --arguments ckpt logs --set NUM_GPUS=16
    megatron-ds check --summary recipes/*.sh
    megatron-ds check --run-tiny train.sh
    megatron-ds check --for engine ds_config.json

Every flag and key is done, accepted because there is nothing to do, refused with the reason and what to write
instead, or unknown; at the end is the command line to write here. The exit code is 0 if all files would run,
1 if one would not, and 2 if one cannot be read. Scripts are read, not run: values that only a run could know,
such as $1, are not checked. For an engine, "auto" has the defaults of transformers' Trainer.
"""

import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_ds.cli import Arguments
from megatron_ds.console import shortened
from megatron_ds.errors import ConfigError

WIDTH = 110
LONGEST_ARGUMENT = 2**17 - 1  # bytes of a word that Linux passes to a program
UNREADABLE = "cannot be read"
AUTOS = '; the program fills "auto", here with the defaults of transformers\' Trainer: '


def main(argv: Sequence[str] | None = None) -> int:
    """Check all files. Returns the exit code."""
    args = _parser().parse_args(argv)
    if args.world_size is not None and args.world_size < 1:
        raise ConfigError(f"--world-size {args.world_size}: give at least 1.")
    variables = dict(_pair(text) for text in args.variables)
    # These modules load torch, so the flags are checked first.
    from megatron_ds.compat.recipes.file import read_recipe
    from megatron_ds.compat.recipes.verdict import assess
    from megatron_ds.training.pretrain import KNOWN_NAMES, RULES

    obstacles: Counter[str] = Counter()
    accepted = 0
    for path in args.files:
        # A file that cannot be read counts, and the others are still checked.
        try:
            trainings = read_recipe(path, variables, args.arguments)
            assessed = [
                assess(training, KNOWN_NAMES, RULES, args.world_size)
                for training in trainings
            ]
        except ConfigError as error:
            print(f"{path}: cannot be read: {error}" if args.summary else f"{error}\n")
            obstacles[UNREADABLE] += 1
            continue
        # A JSON for an engine has no training command.
        if args.reader == "engine" and not trainings[0].script:
            problems, filled = _read_by_engine(path, args.world_size or 1)
            accepted += not problems
            obstacles.update(f"engine: {problem[:90]}" for problem in problems)
            answer = _with_short_words("; ".join(problems)) or "accepted"
            autos = f"{AUTOS}{', '.join(filled)}" if filled else ""
            print(f"{path}, for megatron_ds.initialize: {answer}{autos}")
            continue
        # A recipe is accepted if all its trainings are.
        is_accepted = all(one.is_accepted for one in assessed)
        obstacles[UNREADABLE] += not all(one.is_read for one in assessed)
        if args.run_tiny and is_accepted:
            is_accepted = _trains(path, trainings[0], assessed[0].ranks)
            accepted += is_accepted
            continue
        accepted += is_accepted
        # One line a file, or all that was found in it.
        if args.summary:
            names = sorted(set().union(*(_obstacles(one) for one in assessed)))
            obstacles.update(names)
            print(f"{path}: {'accepted' if is_accepted else ', '.join(names)}")
        else:
            for training, one in zip(trainings, assessed):
                print("\n".join(_report(path, training, one)))
    # The flags that stop most files come first.
    if args.summary:
        print(f"\n{accepted} of {len(args.files)} accepted")
        for name, count in (+obstacles).most_common():
            print(f"{count:5}  {name}")
    # An unreadable file is worse than one that is not accepted.
    if obstacles[UNREADABLE]:
        return 2
    return 0 if accepted == len(args.files) else 1


def _parser() -> Arguments:
    parser = Arguments(__doc__)
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="shell script, YAML or JSON"
    )
    # A shell knows arguments and environment, and the file does not state them.
    parser.add_argument(
        "--arguments",
        nargs="*",
        default=[],
        metavar="WORD",
        help="$1, $2, … of the script",
    )
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        dest="variables",
        help="environment variables of the script",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        help="number of processes, if the recipe does not state it",
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="one line for each file, then how often each flag is refused or unknown",
    )
    parser.add_argument(
        "--run-tiny",
        action="store_true",
        help="train each accepted file for 3 steps, shrunk to what takes seconds, with "
        "its own parallelism, schedules and optimizer, on mock data and CPUs",
    )
    parser.add_argument(
        "--for",
        choices=("train", "engine"),
        default="train",
        dest="reader",
        help="what reads a DeepSpeed JSON: pretrain_gpt.py (default), which has flags of its "
        "own, or megatron_ds.initialize, for training loops of your own",
    )
    return parser


def _read_by_engine(path: Path, ranks: int) -> tuple[list[str], list[str]]:
    """Return (why `megatron_ds.initialize` would refuse a DeepSpeed JSON, the keys whose "auto" a program fills)."""
    from megatron_ds.compat.config.deepspeed_json import load_json
    from megatron_ds.compat.engine.json_settings import read_settings
    from megatron_ds.compat.engine.tensor_parallel_keys import (
        division_keys,
        with_sizes_of_data,
    )
    from megatron_ds.compat.recipes.trainer_values import with_trainer_values
    from megatron_ds.config.sources.reading import ConfigProblems

    filled: list[str] = []
    try:
        block, filled = with_trainer_values(load_json(str(path), "config"), ranks)
        size = division_keys(str(path), block).size
        data = max(1, ranks // size)
        read_settings(with_sizes_of_data(block, size, data), data, name=str(path))
    except ConfigProblems as error:
        return list(error.problems), filled
    except ConfigError as error:
        return [str(error)], filled
    return [], filled


def _trains(path: Path, training, ranks: int) -> bool:
    """Train the recipe shrunk, and print its losses. Returns whether it made its steps."""
    from megatron_ds.compat.recipes.tiny import changed, shrunk
    from megatron_ds.compat.recipes.tiny_run import losses_of
    from megatron_ds.compat.recipes.verdict import config_of
    from megatron_ds.config.parse import parse
    from megatron_ds.training.pretrain import KNOWN_NAMES, RULES

    with tempfile.TemporaryDirectory() as folder:
        # `shrunk` parses the changed options with this function.
        def parsed(text: str, size: int):
            file = Path(folder) / "parsed.yaml"
            file.write_text(text, encoding="utf-8")
            return parse(
                ["--config", str(file)], size, known=KNOWN_NAMES, rules=RULES, env={}
            )

        try:
            config = config_of(training, ranks)
            tiny = shrunk(config, parsed, folder)
            processes = f"{tiny.ranks} process{'es' if tiny.ranks > 1 else ''}"
            print(f"{path}, {processes}: {', '.join(changed(config, tiny))}")
            for flag, why in tiny.left_out.items():
                print(f"  left out: {flag} ({why})")
            # The losses appear while the run makes them.
            for record in losses_of(tiny, Path(folder)):
                print(
                    f"  step {record['step']}: lm loss {record['loss']:.6f}, "
                    f"learning rate {record['learning_rate']:.3e}"
                )
        except ConfigError as error:
            print(f"{path}: does not train: {error}")
            return False
    return True


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write NAME=VALUE.")
    return name, value


def _obstacles(assessment) -> set[str]:
    from megatron_ds.compat.recipes.verdict import Kind

    found = {
        f"{v.kind.value} {shortened(v.name)}"
        for v in assessment.verdicts
        if v.kind in (Kind.REFUSED, Kind.UNKNOWN)
    }
    return found | {f"together: {problem[:90]}" for problem in assessment.problems}


def _report(path: Path, training, assessment) -> Iterator[str]:
    """Yield the lines for one training."""
    from megatron_ds.compat.recipes.verdict import Kind

    reader = (
        training.script
        or "a DeepSpeed JSON for pretrain_gpt.py (--for engine: for initialize)"
    )
    yield f"{path}, {reader}"
    # Verdicts of one kind stand together, since the reader fixes them in the same way.
    for kind in Kind:
        rows = [verdict for verdict in assessment.verdicts if verdict.kind is kind]
        if rows:
            yield f"  {kind.value}:"
        for verdict in rows:
            left = f"    {shortened(verdict.name)} {shortened(verdict.value)}".rstrip()
            yield (
                left
                if not verdict.text
                else f"{left:<48}  {_with_short_words(verdict.text)}"
            )
    for problem in assessment.problems:
        yield f"  refused together: {_with_short_words(problem)}"
    if assessment.command:
        yield f"  write here, for {assessment.ranks} process{'es' if assessment.ranks > 1 else ''}:"
        yield from _wrapped(map(_quoted, assessment.command))
    else:
        yield "  runs as it is" if assessment.is_accepted else "  does not run as it is"
    yield ""


def _with_short_words(text: str) -> str:
    """Return a message with its long words cut: values in it may have any length."""
    return re.sub(r"\S+", lambda word: shortened(word[0]), text)


def _quoted(word: str) -> str:
    """Return a word quoted for a command line. A word that is too long for any program is cut."""
    if len(word) > LONGEST_ARGUMENT:
        return shortened(shlex.quote(word))
    return _open_word(word) if "\x01" in word else shlex.quote(word)


def _open_word(word: str) -> str:
    """Return a word whose value the recipe does not state: its variable, or a gap where a command computes it."""
    from megatron_ds.compat.recipes.shell_values import IS_OPEN, shown

    if any(re.search(r"[(`]", inner) for inner in IS_OPEN.findall(word)):
        return IS_OPEN.sub("<computed>", word)
    return shown(word)


def _wrapped(words: Iterable[str]) -> Iterator[str]:
    line = "   "
    for word in words:
        if len(line) + len(word) + 3 > WIDTH:
            yield line + " \\"
            line = "       "
        line += " " + word
    yield line
