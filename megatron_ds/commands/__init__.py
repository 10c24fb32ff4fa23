"""`megatron-ds COMMAND …` and `python -m megatron_ds COMMAND …`: the table of the commands.

Each command is a module of the subject that it serves, imported when the command runs: the list of commands is
printed at once, also where torch is not installed. Scripts in tools/ of the checkout run the same commands.
"""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NoReturn

from ..cli import main_guard, run_command
from ..errors import ConfigError
from ..features import FLAG, features, import_features, is_installed, missing_wings
from ..registry import did_you_mean
from ..version import __version__

PROGRAM = "megatron-ds"
PACKAGE = __name__.partition(".")[0]
PRETRAIN = "training.pretrain"


@dataclass(frozen=True)
class Command:
    """A command. module: its name below the package, or that of a feature's command in full; summary: for the list

    function   takes the command line and returns the exit code
    before     flags that the command adds in front of those given
    defaults   further arguments of the function
    rank       of the printed errors; None: that of the launcher's environment
    """

    module: str
    summary: str
    function: str = "main"
    before: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rank: int | None = None


def _training(summary: str, *before: str, **defaults: Any) -> Command:
    return Command(PRETRAIN, summary, "pretrain", before, defaults)


def _alone(module: str, summary: str) -> Command:
    """Return a command of one process, whatever launcher started it."""
    return Command(module, summary, "run_tool", rank=0)


COMMANDS: dict[str, Command] = {
    "train": _training("train a GPT, or a BERT with --model bert"),
    "train-bert": _training("train a BERT", model="bert"),
    "plan": _training(
        "print the memory, traffic and schedule of a training; nothing runs",
        "--dry-run",
    ),
    "launch": Command(
        "extensions.launch.command",
        "start the ranks of a training on one machine or many",
        rank=0,
    ),
    "as-deepspeed": Command(
        "compat.deepspeed.program_environment",
        "start a program in which `import deepspeed` imports this package",
    ),
    "env": Command(
        "extensions.launch.env_report",
        "print what this machine offers, or measure ranks (--check)",
    ),
    "generate": Command(
        "extensions.generation.generate_text",
        "continue text with a trained model",
        "run_tool",
    ),
    "serve": Command(
        "extensions.serving.serve",
        "answer requests for text over HTTP with a trained model",
        "run_tool",
    ),
    "evaluate": Command(
        "extensions.evaluation.evaluate",
        "measure a checkpoint on texts and benchmarks",
        "run_tool",
    ),
    "check": Command(
        "compat.recipes.check",
        "list what a recipe of Megatron or DeepSpeed would do here",
    ),
    "engine-check": Command(
        "compat.recipes.check",
        "the same for the JSON of a program that calls initialize()",
        before=("--for", "engine"),
    ),
    "corpus": Command(
        "extensions.corpora.build_corpus",
        "build a corpus of English from the documentation of this Python",
    ),
    "tokenizer": Command(
        "extensions.corpora.train_tokenizer", "train a tokenizer on text"
    ),
    "preprocess": Command(
        "extensions.corpora.preprocess_data", "turn text into tokens for training"
    ),
    "merge": Command(
        "extensions.corpora.merge_datasets", "merge several corpora into one"
    ),
    "inspect": Command(
        "extensions.corpora.inspect_dataset", "show what is in a corpus, and check it"
    ),
    "analyze": Command(
        "extensions.data_efficiency.analyze_data",
        "measure how difficult samples are, for a curriculum",
    ),
    "prepare-cache": Command(
        "commands.prepare_cache", "build the index maps of a training before it starts"
    ),
    "convert": _alone(
        "compat.conversion.convert_checkpoint",
        "convert checkpoints of Hugging Face, Megatron and DeepSpeed",
    ),
    "export": _alone(
        "commands.checkpoint_to_safetensors",
        "write weights, with this package's names, as safetensors",
    ),
    "zero-to-fp32": _alone(
        "compat.deepspeed.weights_of_zero",
        "take the fp32 weights out of an engine's checkpoint",
    ),
    "upcycle": _alone(
        "extensions.upcycling.upcycle_checkpoint",
        "make a checkpoint with experts from a dense one",
    ),
    "merge-adapter": _alone(
        "compat.conversion.merge_adapter",
        "add adapters to the weights beside which they were trained",
    ),
    "verify": _alone(
        "commands.verify_checkpoint", "compare a checkpoint with its checksums"
    ),
    "longest-sequence": Command(
        "extensions.dry_run.find_longest_sequence",
        "find the longest sequence that fits the memory",
    ),
    "search": Command(
        "extensions.plan_time.search_layouts",
        "find the fastest layouts of a training, by planned seconds",
    ),
    "schedule": Command(
        "extensions.report.show_schedule",
        "draw a pipeline schedule, planned or measured",
    ),
    "report": Command(
        "extensions.report.command",
        "write a page about runs: curves, goodput, settings",
    ),
    "watch": Command(
        "extensions.report.watch_run", "show a run in the terminal while it trains"
    ),
    "plot-loss": Command("extensions.report.plot_loss", "draw the loss curve of a run"),
    "plot-experts": Command(
        "extensions.report.plot_expert_load",
        "draw how evenly the experts of a run are used",
    ),
    "draw-context": Command(
        "extensions.report.draw_context",
        "draw how context-parallel ranks share a sequence",
        "run_tool",
    ),
}
EXAMPLES = f"""examples:
  {PROGRAM} train --mock-data --vocab-size 512 --num-layers 2 --hidden-size 64 --num-attention-heads 4 \\
      --seq-length 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 20 --lr 1e-3
  torchrun --nproc-per-node 4 -m megatron_ds train --config run.yaml --tensor-model-parallel-size 2
  {PROGRAM} plan --world-size 1024 --config run.yaml
  {PROGRAM} check train.sh ds_config.json
  {PROGRAM} generate --load runs/tiny --prompt "Once"
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command that the first word names, and exit with its code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        code = main_guard(lambda: print(overview()))
        sys.exit(code or (0 if words else 2))
    if words[0] == "--version":
        print(__version__)
        sys.exit(0)
    name, *rest = words
    if name in COMMANDS:
        run(name, rest, f"{PROGRAM} {name}")
    sys.exit(main_guard(lambda: _of_feature(name, rest)))


def _of_feature(name: str, argv: Sequence[str]) -> int | None:
    """Run a command of a feature, of an installed one or of one that --import names."""
    modules, words = _imported(argv)
    import_features(modules)
    added = _added_commands()
    if name not in added:
        _unknown(name, added)
    command = added[name]
    words = [*command.before, *words]
    sys.argv = [f"{PROGRAM} {name}", *words]
    function = getattr(import_module(command.module), command.function)
    return function(words, **command.defaults)


def _added_commands() -> dict[str, Command]:
    """Return the commands of features. Raises ConfigError for a name that the package has."""
    found: dict[str, Command] = {}
    for feature in features():
        for name, command in feature.commands.items():
            if name in COMMANDS:
                raise ConfigError(
                    f"the feature {feature.name} has a command {name!r}, as the package has. Rename it."
                )
            found[name] = command
    return found


def _imported(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the modules that follow --import, one each time, and the other words. Raises ConfigError."""
    modules = []
    others = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != FLAG:
            others.append(word)
            continue
        module = value if equals else next(words, "")
        if not module:
            raise ConfigError(f"{FLAG} needs the name of a module after it.")
        modules.append(module)
    return modules, others


def run(
    name: str, argv: Sequence[str] | None = None, program: str | None = None
) -> NoReturn:
    """Run one command, and exit with its code. program: its name in the page of --help"""
    command = COMMANDS[name]
    argv = [*command.before, *(sys.argv[1:] if argv is None else argv)]
    sys.argv = [program or sys.argv[0], *argv]
    if command.module == PRETRAIN:
        run_command(
            f"{PACKAGE}.{PRETRAIN}", command.function, argv=argv, **command.defaults
        )
    sys.exit(
        main_guard(
            lambda: _function_of(command)(argv, **command.defaults), rank=command.rank
        )
    )


def _function_of(command: Command) -> Any:
    wing = command.module.partition(".")[0]
    if not is_installed(wing):
        raise ConfigError(f"The command needs {PACKAGE}.{wing}.{missing_wings()}")
    return getattr(import_module(f"{PACKAGE}.{command.module}"), command.function)


def overview() -> str:
    """Return the page of `megatron-ds --help`."""
    listed = {**COMMANDS, **_added_commands()}
    width = max(map(len, listed)) + 4
    columns = min(shutil.get_terminal_size().columns, 110)
    lines = [
        f"usage: {PROGRAM} COMMAND …   (or: python -m megatron_ds COMMAND …)",
        "",
        f"megatron_ds {__version__}. `{PROGRAM} COMMAND --help` lists the flags of a command.",
        "",
    ]
    for name, command in listed.items():
        lines += textwrap.wrap(
            command.summary,
            columns,
            initial_indent=f"  {name}".ljust(width),
            subsequent_indent=" " * width,
        )
    return "\n".join([*lines, "", EXAMPLES])


def _unknown(name: str, added: Mapping[str, Command]) -> NoReturn:
    """Raise ConfigError with the nearest command. Names of files in tools/ are known, too."""
    tool = name.removeprefix("tools/").removesuffix(".py").replace("-", "_")
    modules = {
        command.module.rpartition(".")[2]: known
        for known, command in reversed(COMMANDS.items())
    }
    hint = (
        f"; it is {modules[tool]!r} here."
        if tool in modules
        else did_you_mean(name, [*COMMANDS, *added, "--help", "--version"])
        or did_you_mean(tool, [*modules])
    )
    raise ConfigError(
        f"unknown command {name!r}{hint or '.'} Commands: {', '.join([*COMMANDS, *added])}."
    )
