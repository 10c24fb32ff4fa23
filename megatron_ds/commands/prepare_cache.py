"""Build the index maps of a run before it starts, on one machine, without GPUs, from the flags of the run.

    megatron-ds prepare-cache --prepare-cache-world-size 64 --data-cache-path cache FLAGS_OF_PRETRAIN_GPT

The run then maps these files and starts at once. The tool also prints how many samples the run draws from
each corpus. The number of ranks is needed to check the flags and, with --micro-batch-size but no
--global-batch-size, for the number of samples; the index maps themselves do not depend on it.
"""

import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.cli import Arguments
from megatron_ds.config import RunConfig, parse
from megatron_ds.console import set_up_logging
from megatron_ds.data.loading.blend import parse_blend
from megatron_ds.data.loading.cache import default_cache
from megatron_ds.data.loading.datasets import build_datasets, fit_default_split
from megatron_ds.data.loading.sources import read_sources
from megatron_ds.data.tokenizers import build_tokenizer
from megatron_ds.errors import ConfigError, DataError
from megatron_ds.planning.run_plan import RULES
from megatron_ds.training.pretrain import KNOWN_NAMES
from megatron_ds.training.samples import wanted_samples

WORLD = "--prepare-cache-world-size"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its errors are raised."""
    set_up_logging(logging.INFO, stream=sys.stdout)
    flags, world_size = _world_size(argv)
    config = parse(flags, world_size=world_size, known=KNOWN_NAMES, rules=RULES)
    if config.data.mock_data:
        raise ConfigError(
            "--mock-data has no index maps to prepare. Give the --data-path of the run."
        )
    for folder in _folders(config):
        _check_writable(folder)
    config = fit_default_split(config, wanted_samples(config))
    build_datasets(
        config,
        wanted_samples(config),
        build_tokenizer(config.data, config.model),
        one_epoch=config.sample_order is not None,
    )
    print("index maps are in", ", ".join(map(str, _folders(config))))
    return 0


def _world_size(argv: Sequence[str] | None) -> tuple[list[str], int]:
    """(the flags of the run, the world size)."""
    parser = Arguments(__doc__)
    parser.add_argument(
        WORLD,
        default="1",
        metavar="N",
        dest="size",
        help="world size of the run (default 1)",
    )
    args, flags = parser.parse_known_args(argv)
    number = args.size
    if not number.isdigit() or int(number) < 1:
        raise ConfigError(
            f"{WORLD} {number} is not a number of ranks. Give the world size of the run."
        )
    return flags, int(number)


def _folders(config: RunConfig) -> list[Path]:
    if config.data.data_cache_path:
        return [Path(config.data.data_cache_path)]
    sources = read_sources(config.data)
    named = (
        [sources.whole]
        if sources.whole
        else [part for part in sources.parts if part.values]
    )
    # Corpora of one folder share a cache, so each folder is listed once.
    folders: dict[Path, None] = {}
    for flag, values in named:
        prefixes = parse_blend(values, flag).prefixes
        folders |= dict.fromkeys(map(default_cache, prefixes))
    return list(folders)


def _check_writable(folder: Path) -> None:
    """Raise DataError for a folder that is not writable: there is no use in index maps in memory here."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written: {error.strerror}. Name another folder with "
            "--data-cache-path, here and in the run."
        ) from None
