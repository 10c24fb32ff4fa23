"""A recipe file → its trainings: a shell script, a YAML of Megatron or GPT-NeoX, or a JSON of DeepSpeed.

train.sh    the training commands that it would start (`shell_script`)
*.yaml      `MODEL_ARGS` of Megatron's functional tests, a file for Megatron's --yaml-cfg, or a
            configuration of GPT-NeoX
*.json      a configuration of DeepSpeed
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config.sources.flags import spellings
from ...errors import ConfigError
from ..config.neox_yaml import is_neox
from ..config.unsupported import answer_to_flag
from .budget import LARGEST_YAML, MOST_LAUNCHES, text_of_file
from .shell_script import Script, read_script
from .shell_tokens import ShellError
from .shell_values import IS_OPEN, Scope, fields_of, opened

JSON = "JSON"
YAML = "YAML"
SHELL = "shell"
KINDS = {
    ".json": JSON,
    ".yaml": YAML,
    ".yml": YAML,
    ".sh": SHELL,
    ".bash": SHELL,
    ".slurm": SHELL,
    ".sbatch": SHELL,
}
HEAD = 4096  # characters that are read to recognise a file of another ending
MODEL_ARGS = re.compile(r"MODEL_ARGS(_\d+)?")
NUMBERS = re.compile(r"[-+.\deE]+(\s+[-+.\deE]+)+")
# Names of Megatron's --yaml-cfg that are not a flag's name → the flag for true, the flag for false.
YAML_SWITCHES = {
    "add-bias-linear": ("", "--disable-bias-linear"),
    "fp16": ("--fp16", ""),
    "bf16": ("--bf16", ""),
    "bias-activation-fusion": ("", "--no-bias-gelu-fusion"),
    "bias-dropout-fusion": ("", "--no-bias-dropout-fusion"),
    "masked-softmax-fusion": ("", "--no-masked-softmax-fusion"),
    "gradient-accumulation-fusion": ("", "--no-gradient-accumulation-fusion"),
    "apply-rope-fusion": ("", "--no-rope-fusion"),
    "perform-initialization": ("", ""),
    "overlap-p2p-comm": ("", "--no-overlap-p2p-communication"),
    "tp-comm-overlap": ("--tp-comm-overlap", ""),
    "gated-linear-unit": ("--gated-linear-unit", ""),
}
YAML_ACTIVATIONS = {
    "gelu": (),
    "swiglu": ("--swiglu",),
    "squaredrelu": ("--squared-relu",),
}


@dataclass(frozen=True)
class Training:
    """One training of a recipe.

    script   the Python file that it starts; "" for a JSON alone
    words    its command line, with open values (`shell_values`)
    ranks    how many processes; None if the recipe does not state it
    launcher the words for DeepSpeed's launcher; None if another one starts the training
    files    name → text of the files that the recipe would write: the JSON for --deepspeed_config
    copies   names of `files` that are not the recipe's own: messages show none of their values
    """

    script: str
    words: tuple[str, ...]
    ranks: int | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()
    launcher: tuple[str, ...] | None = None


def read_recipe(
    path: Path, variables: Mapping[str, str], arguments: Sequence[str] = ()
) -> list[Training]:
    """Return the trainings of a file. Raises ConfigError.

    variables  of the environment of a script; arguments: of a script, $1 first
    """
    try:
        kind = kind_of(path)
        if kind == JSON:
            text = text_of_file(path)
            return [
                Training("", ("--deepspeed_config", str(path)), files={str(path): text})
            ]
        if kind == YAML:
            return _of_yaml(path, Scope(dict(variables), list(arguments)))
        return _of_script(read_script(path, variables, arguments), path)
    except ShellError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{path} ')}") from None
    except RecursionError:
        raise ConfigError(
            f"{path}: this is not a recipe: its brackets or conditions are nested too "
            "deep."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: this is not a text file.") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: {(error.strerror or str(error)).lower()}."
        ) from None


def kind_of(path: Path) -> str:
    """Return the kind of a file: by its ending, or for another ending by how it begins."""
    if path.suffix in KINDS:
        return KINDS[path.suffix]
    head = text_of_file(path, errors="replace")[:HEAD].lstrip()
    if head.startswith("{"):
        return JSON
    lines = [
        line
        for line in head.splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    return YAML if lines and re.match(r"---|[\w-]+:(\s|$)", lines[0]) else SHELL


def _of_script(script: Script, path: Path) -> list[Training]:
    """Return the trainings of a script; each has the files that its command line names."""
    found = []
    for launch in script.launches:
        if _is_training(launch.script, launch.words):
            files = _files(script, launch.words)
            copies = frozenset(filter(script.is_copy, files))
            found.append(
                Training(
                    launch.script,
                    launch.words,
                    launch.ranks,
                    files,
                    copies,
                    launch.launcher,
                )
            )
    if not found:
        raise ConfigError(
            f"{path}: no training command in it: no Python file is started with flags such as "
            "--num-layers. If another script sets the variables, give that one."
        )
    return found


def _is_training(script: str, words: Sequence[str]) -> bool:
    """Return whether the command trains: other Python programs prepare data or convert checkpoints."""
    flags = {word.partition("=")[0].replace("_", "-") for word in words}
    return bool(
        flags
        & {
            "--num-layers",
            "--train-iters",
            "--train-samples",
            "--micro-batch-size",
            "--deepspeed-config",
            "--yaml-cfg",
        }
    )


def _files(script: Script, words: Sequence[str]) -> dict[str, str]:
    files = {}
    for name, value in zip(words, [*words[1:], ""]):
        flag, equals, inner = name.partition("=")
        if flag.replace("_", "-") in ("--deepspeed-config", "--yaml-cfg", "--config"):
            target = inner if equals else value
            text = script.text_of(target)
            if text is not None:
                files[target] = text
    return files


def _of_yaml(path: Path, scope: Scope) -> list[Training]:
    from ...config.sources.bounded_yaml import load_yaml

    # The file must be a table within the limits of safe YAML.
    text = text_of_file(path, LARGEST_YAML)
    try:
        root = load_yaml(text)
    except ConfigError as error:
        raise ShellError(str(error)) from None
    if not isinstance(root, dict):
        raise ConfigError(f"{path}: this is not a recipe: it has no names and values.")
    # GPT-NeoX's files are configurations by themselves.
    if is_neox(root):
        return [
            Training(
                "pretrain_gpt.py", ("--config", str(path)), files={str(path): text}
            )
        ]
    # Files with MODEL_ARGS hold the flags of one training each.
    blocks = [value for name, value in root.items() if MODEL_ARGS.fullmatch(str(name))]
    if blocks:
        if len(blocks) > MOST_LAUNCHES:
            raise ConfigError(
                f"{path}: more than {MOST_LAUNCHES} blocks of MODEL_ARGS: this is not a "
                "recipe."
            )
        for block in blocks:
            if not isinstance(block, dict | None):
                raise ConfigError(
                    f"{path}: MODEL_ARGS should be a block of `--flag: value` lines, not "
                    f"{str(block)[:60]!r}."
                )
        return [
            Training(_script_of(path), _words_of_args(block or {}, scope))
            for block in blocks
        ]
    # Other files give flags as names and values, in blocks of any depth.
    return [Training("pretrain_gpt.py", _words_of_cfg(root))]


def _script_of(path: Path) -> str:
    return (
        "pretrain_bert.py"
        if "bert" in path.parent.name + path.parent.parent.name
        else "pretrain_gpt.py"
    )


def _words_of_args(block: Mapping[str, Any], scope: Scope) -> tuple[str, ...]:
    """`--flag: value` lines, as Megatron's test runner reads them.

    `true` stands for the flag without a value, a list for the words after the flag, and so do several numbers
    in one line.
    """
    words: list[str] = []
    for flag, value in block.items():
        words.append(str(flag))
        if value is True or value is None or value == "":
            continue
        if isinstance(value, list):
            words += " ".join(map(str, value)).split()
            continue
        text = str(value).strip()
        if NUMBERS.fullmatch(text):
            words += text.split()
            continue
        if re.fullmatch(r"\[[^\]]+\]", text):
            words += text[1:-1].split()
        elif "$" in text:
            words += fields_of(f'"{text}"', scope) or [opened(text)]
        else:
            words.append(text)
    return tuple(words)


def _words_of_cfg(root: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a --yaml-cfg file as flags: `hidden_size: 64` in any of its blocks."""
    words: list[str] = []
    for name, value in root.items():
        if name == "gated_linear_unit" and root.get("activation_func") == "swiglu":
            continue  # part of it
        if isinstance(value, dict):
            words += _words_of_cfg(value)
            continue
        flag = str(name).replace("_", "-")
        if isinstance(value, bool):
            words += _words_of_switch(flag, value)
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        elif flag == "activation-func" and value in YAML_ACTIVATIONS:
            words += YAML_ACTIVATIONS[value]
        elif value is not None:
            words += [f"--{flag}", IS_OPEN.sub("", str(value))]
    return tuple(words)


def _words_of_switch(flag: str, value: bool) -> list[str]:
    """Return the words for a name that is true or false; a name that no project has is written with its value."""
    name = f"--{flag}"
    if flag in YAML_SWITCHES:
        on, off = YAML_SWITCHES[flag]
    elif (spelling := spellings().get(name)) is not None:
        option = spelling.option
        on = name
        off = (
            option.negative
            if option.kind is bool and option.default and spelling.value
            else ""
        )
    else:
        on = name
        off = "" if answer_to_flag(name) else f"{name}=false"
    word = on if value else off
    return [word] if word else []
