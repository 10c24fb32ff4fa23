"""Verdicts on a training of a recipe: what of it would be done, accepted, refused, or is unknown.

    done        an option has the flag's value
    accepted    nothing to do: the reason is that of `compat/config/unsupported.py`
    refused     with the reason and what to write
    unknown     with the nearest name

A value that the recipe does not state, such as `$1`, is not checked.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

from ...config.messages import Rule
from ...config.parse import assembled, check
from ...config.run import RunConfig, all_options
from ...config.sources.answers import OFF
from ...config.sources.flags import (
    CONFIG_FLAG,
    DEEPSPEED_FLAG,
    LOCAL_RANK_FLAG,
    CommandLine,
    Spelling,
    canonical,
    flags_with_words,
    read_flags,
    settled,
    spellings,
)
from ...config.sources.foreign_words import foreign_words
from ...config.sources.reading import SourceReading, attempt
from ...errors import ConfigError
from ..config.deepspeed_json import reading_of, unique_keys
from ..config.deepspeed_spellings import loads
from ..config.dialects import PATTERN_FLAGS
from ..config.neox_yaml import is_neox, read_neox
from ..config.unsupported import answer_to_flag
from .budget import MOST_FLAGS, MOST_RANKS, MOST_WORDS
from .file import Training, read_recipe
from .shell_values import CLOSE, IS_OPEN, OPEN, shown

YAML_FLAG = "--yaml-cfg"
UNSET = r"\(default\)|^missing:|there is none"  # in problems with options that are not given
OTHER_FLAGS = "?"  # stands for options that an open word may hold: $more_options
PATHS_OF_DATA = ("data.data_path", "data.train_data_path")
# Possessive: no part is tried twice, so the time grows with the length alone.
OPEN_VALUE = rf"{OPEN}[^{OPEN}{CLOSE}]*+{CLOSE}"
OPEN_IN_JSON = (
    re.compile(rf'"[^"\n{OPEN}]*+(?:{OPEN_VALUE}[^"\n{OPEN}]*+)++"'),
    re.compile(OPEN_VALUE),
)
# A name in capitals or a variable, which sed would replace in a template.
TEMPLATE_NAME = re.compile(
    r"(?<=[:\s\[,])(?:(?!true|false|null)[A-Z][A-Z0-9_a-z]*|\$\{\w+\})(?=\s*[,}\]\n])"
)


NO_PATTERN = (
    "without --hybrid-layer-pattern all its layers are Mamba layers, and what they have besides is not stated. Give a "
    "pattern such as M-M*-, or start pretrain_gpt.py."
)


class Kind(Enum):
    """What happens to a flag or key."""

    DONE = "done"
    ACCEPTED = "accepted, nothing to do"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """name: flag or key as written; value: as written; text: what is written here, or the reason."""

    name: str
    value: str
    kind: Kind
    text: str


@dataclass(frozen=True)
class Assessment:
    """The verdicts on a training.

    problems   between several options; the values are those of the recipe for `ranks` processes
    command    the command line to write here; empty if something is refused or unknown
    is_read    false if a JSON is none, so that its keys are not known
    """

    verdicts: tuple[Verdict, ...]
    problems: tuple[str, ...]
    ranks: int
    command: tuple[str, ...]
    is_read: bool = True

    @property
    def is_accepted(self) -> bool:
        """Whether the training runs here as it is."""
        return not self.problems and all(
            v.kind in (Kind.DONE, Kind.ACCEPTED) for v in self.verdicts
        )


def assess(
    training: Training,
    known: Mapping[str, Any],
    rules: Sequence[Rule] = (),
    ranks: int | None = None,
) -> Assessment:
    """Return the assessment of one training.

    known, rules  as for `config.parse.parse`
    ranks         how many processes; None: as many as the recipe states, otherwise the fewest

    Raises ConfigError for a training that is beyond the bounds of `budget`.
    """
    if max(ranks or 0, training.ranks or 0) > MOST_RANKS:
        raise ConfigError(
            f"{max(ranks or 0, training.ranks or 0)} processes: at most {MOST_RANKS:,} can be "
            "checked."
        )
    try:
        return _assessed(training, known, rules, ranks)
    except RecursionError:
        raise ConfigError(
            f"{training.script or 'a JSON'}: its brackets are nested too deep."
        ) from None


def _assessed(
    training: Training,
    known: Mapping[str, Any],
    rules: Sequence[Rule],
    ranks: int | None,
) -> Assessment:
    # Flags and files, with a verdict for each.
    line, verdicts, unread, words = _read_words(training)
    readings = []
    for name, text in training.files.items():
        reading = _read_file(name, text, is_copy=name in training.copies)
        readings.append(reading)
        verdicts += _of_json(reading)
    if ranks is None:  # a script often states the processes of one of its nodes
        ranks = training.ranks
        fewest = _fewest(line, readings)
        ranks = fewest if ranks is None or ranks % fewest and ranks < fewest else ranks
    if _is_hybrid(training.script) and not {*map(canonical, words)} & {*PATTERN_FLAGS}:
        verdicts.append(Verdict(training.script, "", Kind.REFUSED, NO_PATTERN))
    # The rules of the configuration, without values that are not known.
    defaults = {"model": "bert"} if "bert" in training.script else {}
    problems: list[str] = []
    if training.script:
        unread |= set().union(*(reading.unread for reading in (line, *readings)))
        if unread & {"data.vocab_file", "data.merge_file"}:  # they imply a tokenizer
            unread.add("data.tokenizer_type")
        problems = _problems(line, readings, ranks, defaults, known, rules, unread)
    assessed = Assessment(tuple(verdicts), tuple(problems), ranks, ())
    return Assessment(
        assessed.verdicts,
        assessed.problems,
        ranks,
        _command(training, ranks, words) if assessed.is_accepted else (),
        all(reading.is_complete for reading in readings),
    )


def config_of(training: Training, ranks: int) -> RunConfig:
    """Return the configuration of a training for this many processes; open values have their defaults."""
    line, _, _, _ = _read_words(training)
    readings = [
        _read_file(name, text, is_copy=name in training.copies)
        for name, text in training.files.items()
    ]
    defaults = {"model": "bert"} if "bert" in training.script else {}
    return assembled(line, readings, ranks, defaults)[0]


def config_of_recipe(path: Path, ranks: int) -> RunConfig:
    """Return the configuration of the first training of a recipe, for this many processes. Raises ConfigError."""
    trainings = read_recipe(path, {})
    if not trainings:
        raise ConfigError(f"{path}: this recipe starts no training.")
    return config_of(trainings[0], ranks)


# ------------------------------------------------------------------------------------------------- flags
def _read_words(
    training: Training,
) -> tuple[CommandLine, list[Verdict], set[str], list[str]]:
    """Return (the flags that are read, a verdict for each, paths with open values, the words to write here)."""
    # Words that belong to no flag are collected apart.
    line = CommandLine()
    verdicts = []
    unread = set()
    kept = []
    stray = CommandLine()
    flags = list(flags_with_words([w for w in training.words if w], stray))
    if len(flags) > MOST_FLAGS:
        raise ConfigError(
            f"{training.script}: {len(flags):,} flags, and at most {MOST_FLAGS:,} are checked."
        )
    # Each flag receives a verdict; flags that are read are kept for the command.
    for typed, words in flags:
        flag = canonical(typed)
        if flag in (DEEPSPEED_FLAG, CONFIG_FLAG, YAML_FLAG) and any(
            name in training.files for name in words
        ):
            kept += [typed, *words]
            continue
        verdict, reading, own = _of_flag(typed, flag, words)
        verdicts.append(verdict)
        line.settings += reading.settings
        line.problems += reading.problems
        unread |= own
        if verdict.kind is Kind.DONE:
            kept += [typed, *words]
    # Stray words are reported, unless their value is open.
    verdicts += [
        Verdict(problem.partition(" ")[0].strip("'\""), "", Kind.UNKNOWN, problem)
        for problem in stray.problems
        if not IS_OPEN.search(problem)
    ]
    return settled(line), verdicts, unread, kept


def _is_hybrid(script: str) -> bool:
    """Return whether a script trains Megatron's hybrid models."""
    return bool(re.search(r"mamba|hybrid", script.rpartition("/")[2]))


def _of_flag(
    typed: str, flag: str, words: list[str]
) -> tuple[Verdict, CommandLine, set[str]]:
    """Return (verdict, what the flag sets, the paths whose value is open)."""
    value = shown(" ".join(words))
    meaning = foreign_words().readers.get(flag, (flag, None))[0]
    spelling = spellings().get(meaning)
    closed = [word for word in words if not IS_OPEN.search(word)]
    is_switch = spelling is not None and spelling.is_switch
    takes_words = not is_switch or meaning != flag
    if (unknown := _not_known(flag, spelling, words, closed, takes_words)) is not None:
        kind, text = (
            (Kind.DONE, spelling.option.flag) if spelling else (Kind.ACCEPTED, "")
        )
        paths = {spelling.option.path} if spelling else set()
        return (
            Verdict(typed, value, kind, f"{text} ({unknown})".strip()),
            CommandLine(),
            paths,
        )
    # An open word after the value, or after a switch, may hold other flags.
    paths = {OTHER_FLAGS} if len(closed) < len(words) else set()
    reading = read_flags([typed, *closed])
    if flag in (DEEPSPEED_FLAG, CONFIG_FLAG, LOCAL_RANK_FLAG):
        return (
            Verdict(typed, value, Kind.DONE, "the file is not part of the recipe"),
            CommandLine(),
            paths,
        )
    if reading.problems:
        text = reading.problems[0]
        kind = Kind.UNKNOWN if text.startswith("unknown flag") else Kind.REFUSED
        return Verdict(typed, value, kind, text), CommandLine(), reading.unread
    if not reading.settings:
        return (
            Verdict(typed, value, Kind.ACCEPTED, reading.without_effect.get(flag, "")),
            reading,
            paths,
        )
    names = " ".join(all_options()[setting.path].flag for setting in reading.settings)
    return (
        Verdict(typed, value, Kind.DONE, "" if names == flag else names),
        reading,
        paths,
    )


def _not_known(
    flag: str,
    spelling: Spelling | None,
    words: Sequence[str],
    closed: Sequence[str],
    takes_words: bool,
) -> str | None:
    """Return why the value of a flag is not known here; None if it is."""
    has_open = len(closed) < len(words)
    if spelling is None:
        answer = answer_to_flag(flag)
        depends = answer is not None and (
            answer.values is None or not set(answer.values) <= set(OFF)
        )
        return "value not known here" if has_open and not closed and depends else None
    if has_open and takes_words and (spelling.option.is_list or not closed):
        return "value not known here"
    return "a gap that the reader fills" if _is_gap(spelling, closed) else None


def _is_gap(spelling: Spelling, words: Sequence[str]) -> bool:
    """Return whether the reader of the recipe is to fill in a value: it is left out, or it is several words, such as
    "your tokenizer path"."""
    option = spelling.option
    if (
        spelling.is_switch
        or option.kind is not str
        or option.choices
        or option.alone is not None
    ):
        return False
    if not words:
        return True
    are_words = all(re.fullmatch(r"[\w+.-]*[a-zA-Z][\w+.-]*", word) for word in words)
    return not option.is_list and len(words) > 1 and are_words


# -------------------------------------------------------------------------------------------------- JSON
def _read_file(name: str, text: str, is_copy: bool) -> SourceReading:
    """Return the reading of a YAML of GPT-NeoX, or of a JSON of DeepSpeed."""
    from ...config.sources.bounded_yaml import load_yaml

    is_yaml = name.endswith((".yml", ".yaml")) or not text.lstrip().startswith("{")
    try:
        root = load_yaml(text) if is_yaml else None
    except ConfigError:
        root = None
    if root is None or not is_neox(root):
        return _read_json(name, text, is_copy)
    reading = read_neox(name.rpartition("/")[2], [root])
    if not any(setting.path in PATHS_OF_DATA for setting in reading.settings):
        # They are in another file of the run.
        reading.unread |= {
            *PATHS_OF_DATA,
            "data.tokenizer_type",
        }
    return reading


def _read_json(name: str, text: str, is_copy: bool) -> SourceReading:
    """Read a JSON whose open values, and names that sed would replace, are "auto".

    is_copy: the text is not the recipe's own; problems and notes then show no text of its values
    """
    for pattern in OPEN_IN_JSON:
        text = pattern.sub('"auto"', text)
    try:
        block = _block_of(shown(name), text)
        texts = _texts_in(block, shown(name))
        reading = reading_of(shown(name).rpartition("/")[2], block)
        if is_copy:
            reading.problems = [
                _without(texts, problem) for problem in reading.problems
            ]
            reading.without_effect = {
                _without(texts, name): _without(texts, why)
                for name, why in reading.without_effect.items()
            }
        return reading
    except ConfigError as error:
        reading = SourceReading(is_complete=False)
        reading.refuse(error)
        return reading


def _block_of(name: str, text: str) -> dict[str, Any]:
    """Return the block of a JSON text. Raises ConfigError."""
    parsed = partial(loads, object_pairs_hook=unique_keys(name))
    try:
        try:
            block = parsed(text)
        except json.JSONDecodeError:
            block = parsed(TEMPLATE_NAME.sub('"auto"', text))
    except RecursionError:
        raise ConfigError(
            f"{name}: this is not a configuration: its brackets are nested too deep."
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}: this is not JSON: {error}.") from None
    except ConfigError:  # it is a ValueError, too
        raise
    except ValueError:
        raise ConfigError(
            f"{name}: a number has more digits than can be read."
        ) from None
    if not isinstance(block, dict):
        raise ConfigError(f"{name} should contain one block {{ … }} of keys.")
    return block


def _texts_in(block: Mapping[str, Any], name: str) -> set[str]:
    """Return the texts among the values, and the keys that are no names. Raises ConfigError for too many values."""
    texts = set()
    waiting = [block]
    keys = 0
    values = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            keys += len(value)
            texts |= {key for key in value if not re.fullmatch(r"[\w.]{1,60}", key)}
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str):
            texts.add(value)
        values += 1
        if keys > MOST_FLAGS or values > MOST_WORDS:
            raise ConfigError(
                f"{name}: more than {MOST_FLAGS:,} keys or {MOST_WORDS:,} values: this is not "
                "a configuration."
            )
    return texts


def _without(texts: set[str], problem: str) -> str:
    """Replace each of the texts in a problem by …, the longest first. Short texts are replaced only in quotes."""
    for text in sorted(texts, key=len, reverse=True):
        for spelled in (text, text.lower()):
            quoted = (repr(spelled), json.dumps(spelled))
            for found in (*quoted, spelled) if len(spelled) > 5 else quoted:
                problem = problem.replace(found, "…")
    return problem


def _of_json(reading: SourceReading) -> Iterator[Verdict]:
    for setting in reading.settings:
        file, _, key = str(setting.source).partition(" ")
        yield Verdict(key, str(setting.value), Kind.DONE, setting.path)
    for name, why in reading.without_effect.items():
        yield Verdict(name.partition(" ")[2] or name, "", Kind.ACCEPTED, why)
    for problem in reading.problems:
        quoted = re.search(r'"([\w.]+)"', problem)
        kind = Kind.UNKNOWN if "unknown key" in problem else Kind.REFUSED
        yield Verdict(quoted[1] if quoted else "", "", kind, problem)


# -------------------------------------------------------------------------------------------- the whole
def _fewest(line: CommandLine, readings: Sequence[SourceReading]) -> int:
    """Return the number of copies that the batch sizes imply, or one, times the fewest processes that hold a copy
    of the model with its experts divided as asked."""
    found = dict.fromkeys(
        ("micro_batch_size", "global_batch_size", "gradient_accumulation_steps")
    )
    for setting in (
        *(s for reading in readings for s in reading.settings),
        *line.settings,
    ):
        if setting.path.startswith("train.") and setting.path[6:] in found:
            found[setting.path[6:]] = setting.value
    micro, whole, steps = found.values()
    copies = whole // (micro * steps) if micro and whole and steps else 1
    config, _ = assembled(line, readings, 1)
    parallel = config.parallel
    # The ranks that divide a dense layer may have different experts.
    tp = parallel.tensor_model_parallel_size
    within = max(1, tp // (parallel.expert_tensor_parallel_size or tp))
    ep = parallel.expert_model_parallel_size
    return parallel.model_parallel_size * max(copies, ep // gcd(ep, within))


def _problems(
    line: CommandLine,
    readings: Sequence[SourceReading],
    ranks: int,
    defaults: Mapping[str, Any],
    known: Mapping[str, Any],
    rules: Sequence[Rule],
    unread: set[str],
) -> list[str]:
    """Return the problems of several options together, which are the fault of no single flag."""
    try:
        config, problems = assembled(line, readings, ranks, defaults)
    except ConfigError as error:
        return [str(error)]
    own = {problem for reading in readings for problem in reading.problems}
    found: list[str] = []
    attempt(
        found, lambda: check(config, known, () if unread else rules, problems, unread)
    )
    if OTHER_FLAGS in unread:  # it may set what has its default here, or is missing
        found = [problem for problem in found if not re.search(UNSET, problem)]
    return [problem for problem in found if problem not in own]


def _command(training: Training, ranks: int, words: Sequence[str]) -> tuple[str, ...]:
    if not training.script:
        return ()
    command = "train-bert" if "bert" in training.script else "train"
    return (*_launcher(training, ranks), "megatron_ds", command, *words)


def _launcher(training: Training, ranks: int) -> tuple[str, ...]:
    """Return the words that start a module: those that the recipe gives to DeepSpeed's launcher, else torchrun's."""
    if training.launcher is not None and training.ranks in (None, ranks):
        words = (w for w in training.launcher if w not in ("--module", "--no_python"))
        return ("megatron-ds", "launch", *words, "--module")
    nodes = ("--nnodes", str(-(-ranks // 8))) if ranks > 8 else ()
    return ("torchrun", *nodes, "--nproc-per-node", str(min(ranks, 8)), "-m")
