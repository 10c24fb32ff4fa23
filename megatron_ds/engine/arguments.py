"""What `initialize` takes from a program's command line, and the flags that DeepSpeed's programs have for it.

    parser = megatron_ds.add_config_arguments(argparse.ArgumentParser())        # --deepspeed, --deepspeed_config
    engine, *_ = megatron_ds.initialize(args=parser.parse_args(), model=module)
"""

import os
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config, under DeepSpeed's names, so that its launch commands work as they are."""
    group = parser.add_argument_group("DeepSpeed", "flags of programs that were written for DeepSpeed")
    group.add_argument("--deepspeed", action="store_true",
                       help="Has no effect of its own: programs read it to choose between two loops.")
    group.add_argument("--deepspeed_config", type=str, default=None, help="Path of the JSON with DeepSpeed's keys.")
    group.add_argument("--local_rank", type=int, default=-1, help=SUPPRESS) if not _has(parser, "--local_rank") else None
    return parser


def config_of(args: Any, config: Any, config_params: Any) -> Mapping[str, Any] | str | os.PathLike:
    """The configuration: `config`, its former name `config_params`, or the file that `args.deepspeed_config` names.

    Raises ConfigError when there is none, or more than one.
    """
    given = {"config": config, "config_params": config_params,
             "args.deepspeed_config": getattr(args, "deepspeed_config", None)}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"the configuration is given {len(named)} times, as {' and as '.join(named)}. Keep one of them.")
    if not named:
        raise ConfigError("there is no configuration. Give config=, a dict of DeepSpeed's keys or the path of a JSON file, or "
                          "args= with --deepspeed_config (see megatron_ds.add_config_arguments).")
    return given[named[0]]


def take_local_rank(args: Any, env: dict[str, str] | None = None) -> None:
    """Launchers of old give a process its number on the machine as --local_rank instead of the variable LOCAL_RANK.

    Sets LOCAL_RANK where it is missing. Raises ConfigError when both are there and differ.
    """
    env = os.environ if env is None else env
    rank = getattr(args, "local_rank", None)
    if rank is None or rank < 0:
        return
    if env.setdefault("LOCAL_RANK", str(rank)) != str(rank):
        raise ConfigError(f"args.local_rank is {rank}, but the environment has LOCAL_RANK={env['LOCAL_RANK']}. Start the "
                          "program with torchrun, and leave out --local_rank.")


def _has(parser: ArgumentParser, flag: str) -> bool:
    return flag in parser._option_string_actions
