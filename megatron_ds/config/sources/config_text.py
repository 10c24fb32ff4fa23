"""Texts of options and configurations: `--help`, YAML, the values in run.json, options without effect."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...features import FLAG as IMPORT_FLAG
from ...features import features, origins
from ..messages import either, needed, value_text
from ..options.option import Option
from ..run import (
    RunConfig,
    all_options,
    options_in,
    sections,
)
from .flags import CONFIG_FLAG, DEEPSPEED_FLAG
from .foreign_words import foreign_words

WIDTH = 120
COLUMN = 44
TITLES = {
    "model": "Model",
    "parallel": "Parallelism",
    "zero": "ZeRO",
    "optimizer": "Optimizer",
    "cycle": "OneCycle and LRRangeTest",
    "train": "Training",
    "data": "Data",
    "checkpoint": "Checkpoints",
    "logging": "Logging",
    "profiler": "Measurements",
    "plan": "Planning",
}
FILES = (
    (
        f"{CONFIG_FLAG} FILE …",
        "YAML files with the names below (num_layers: 12), or a checkpoint's run.json. "
        "Flags override files; two files may not give an option different values.",
    ),
    (
        f"{DEEPSPEED_FLAG} FILE",
        'A DeepSpeed JSON. "auto" in it means: take the value from the flags.',
    ),
    (
        f"{IMPORT_FLAG} MODULE …",
        "Modules with features of other packages, which are imported before the flags are read. In a YAML file: "
        "import. Features of installed distributions are found without it.",
    ),
)
COMMANDS = (
    ("--help, -h", "Print this text and exit."),
    ("--help-short", "Print the flags that most runs set, in one page, and exit."),
    ("--version", "Print the versions of megatron_ds, torch and Python, and exit."),
    (
        "--print-config",
        "Print the complete configuration as YAML for --config, with the source of each "
        "value, and exit.",
    ),
    (
        "--strict-flags",
        "Make it an error to give a flag or key that changes nothing here; otherwise startup "
        "lists them.",
    ),
    (
        "--local-rank N",
        "Accepted because some launchers append it; the rank follows from the launcher's "
        "environment.",
    ),
)
MOST_USED: Mapping[str, tuple[str, ...]] = {
    "Model": (
        "model.num_layers",
        "model.hidden_size",
        "model.num_attention_heads",
        "model.num_query_groups",
        "model.seq_length",
        "model.position_embedding_type",
        "model.normalization",
        "model.activation",
        "model.vocab_size",
    ),
    "Batches and length": (
        "train.micro_batch_size",
        "train.global_batch_size",
        "train.train_iters",
    ),
    "Learning": (
        "optimizer.lr",
        "optimizer.min_lr",
        "optimizer.lr_decay_style",
        "optimizer.lr_warmup_iters",
        "optimizer.weight_decay",
        "optimizer.clip_grad",
        "optimizer.bf16",
    ),
    "Layout": (
        "parallel.tensor_model_parallel_size",
        "parallel.sequence_parallel",
        "parallel.pipeline_model_parallel_size",
        "parallel.context_parallel_size",
        "zero.stage",
        "train.recompute_granularity",
    ),
    "Data": (
        "data.data_path",
        "data.tokenizer_type",
        "data.tokenizer_model",
        "data.mock_data",
    ),
    "Checkpoints and log": (
        "checkpoint.save",
        "checkpoint.load",
        "checkpoint.save_interval",
        "logging.log_interval",
        "logging.tensorboard_dir",
    ),
    "Without training": ("plan.dry_run", "plan.world_size", "plan.device_memory"),
}
WIDEST = 48  # widest column; longer values are not aligned


def help_text() -> str:
    """All options by section, with defaults and advice on when not to use them."""
    # What every run needs.
    required = ", ".join(
        option.flag for option in all_options().values() if option.required
    )
    intro = (
        f"Required: {required}, "
        "--train-iters, --train-samples or --train-tokens, and data (--data-path with --tokenizer-type, "
        "or --mock-data). --num-layers and --num_layers are the same flag, and so are --lr 1e-4 and "
        "--lr=1e-4. The flags that most runs set, in one page: --help-short."
    )
    # Files and information, which are no options.
    lines = [
        *textwrap.wrap(intro, WIDTH, break_on_hyphens=False),
        "",
        "Files",
        *_rows(FILES),
        "",
        "Information",
        *_rows(COMMANDS),
    ]
    # The options of each section.
    for section in sections():
        lines += [
            "",
            title_of(section),
            *_rows((invocation(o), explanation(o)) for o in options_in(section)),
        ]
    # Names of forks.
    foreign = foreign_words()
    names = (
        (name, f"The name of {foreign.names[name]} in {project}.")
        for name, project in foreign.projects.items()
    )
    lines += ["", "Names of Megatron's forks", *_rows(names)]
    return "\n".join(lines) + "\n"


def title_of(section: str) -> str:
    """Return the heading of a section."""
    added = {feature.name: feature.title or feature.name for feature in features()}
    return (TITLES | added)[section]


def short_help_text() -> str:
    """Return the options of `MOST_USED`, each in a sentence."""
    lines = [
        "The flags that most runs set; all flags, their defaults and when not to use them: --help."
    ]
    for title, names in MOST_USED.items():
        options = [all_options()[name] for name in names]
        lines += [
            "",
            title,
            *_rows(
                (_first_spelling(option), _first_sentence(option)) for option in options
            ),
        ]
    lines += ["", "Files", *_rows(FILES)]
    return "\n".join(lines) + "\n"


def _first_spelling(option: Option) -> str:
    return invocation(option).split(", ")[0]


def _first_sentence(option: Option) -> str:
    return option.help.partition(". ")[0].removesuffix(".") + "."


def invocation(option: Option) -> str:
    """All spellings of the option, with a placeholder for the value."""
    if option.kind is bool:
        main = (
            [option.flag, option.negative]
            if option.default in (None, True)
            else [option.flag]
        )
        return ", ".join([*main, *(s for s in option.switches if s not in main)])
    what = (
        f"{{{','.join(map(str, option.choices))}}}"
        if option.choices
        else _metavar(option)
    )
    if option.alone is not None:
        what = f"[{what}]"
    return ", ".join(
        [f"{flag} {what}" for flag in (option.flag, *option.flags)]
        + list(option.switches)
    )


def explanation(option: Option) -> str:
    """Help, default, the options that it needs, and when not to use it."""
    text = option.help
    default = default_text(option)
    if default and "Default:" not in text:
        text += f" Default: {default}."
    if option.needs:
        text += f" Needs {either(needed(option.needs))}."
    return f"{text} {option.avoid}".rstrip()


def default_text(option: Option) -> str:
    """Return the default as it is written after the flag. Empty without a default, and for switches that are off."""
    if option.default in (None, ()) or option.default is False:
        return ""
    return "on" if option.default is True else value_text(option.default)


def _metavar(option: Option) -> str:
    word = (
        option.unit
        or {int: "N", float: "X", str: option.name.rsplit("_", 1)[-1]}[option.kind]
    ).upper()
    return (
        f"{word} …"
        if option.is_list and not option.count
        else " ".join([word] * (option.count or 1))
    )


def _rows(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    for left, right in pairs:
        head = textwrap.wrap(
            left,
            WIDTH - 2,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        body = textwrap.wrap(
            right,
            WIDTH,
            initial_indent=" " * COLUMN,
            subsequent_indent=" " * COLUMN,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if len(head) == 1 and len(head[0]) < COLUMN - 1 and body:
            body[0] = head.pop().ljust(COLUMN) + body[0][COLUMN:]
        yield from (*head, *body)


def to_yaml(config: RunConfig) -> str:
    """Every option as YAML for `--config`, with its source as a comment."""
    lines = [
        "# The complete configuration. Use it with --config FILE; flags override it."
    ]
    if modules := [origin.module for origin in origins()]:
        lines.append(f"\nimport: [{', '.join(modules)}]")
    for section in sections():
        lines.append(f"\n{section}:")
        for option in options_in(section):
            value = f"  {option.name}: {_yaml_value(config.get(option.path))}"
            lines.append(
                f"{value.rstrip().ljust(WIDEST)}  # {config.source(option.path)}"
            )
    return "\n".join(lines) + "\n"


def _yaml_value(value: Any) -> str:
    """Strings are quoted, so that YAML keeps them as they are. None is an empty value, which sets nothing."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return (
        json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    )
