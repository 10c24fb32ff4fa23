"""Options that a run takes from the checkpoint of --load: those of model and tokenizer, and with
--use-checkpoint-opt-param-scheduler those of the schedules.
"""

import os
from collections.abc import Mapping, Sequence

from ..checkpoint.load import latest, read_run
from ..checkpoint.place import place_of
from ..checkpoint.tokenizer_files import FIELDS, local_copies
from ..config import RunConfig, Source
from ..config.saved_values import from_dict
from ..config.sources.flags import read_flags
from ..config.sources.reading import Setting
from ..config.training_schedule import counts_tokens, train_span
from ..errors import CheckpointError
from ..features import sections_without_features
from .foreign_checkpoints import folder_of_model

WANTED = "checkpoint.use_checkpoint_args"
TOKENIZER = ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")
# What determines the learning rate and the weight decay at a number of samples.
SCHEDULE = (
    "lr",
    "min_lr",
    "decoupled_lr",
    "decoupled_min_lr",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_decay_tokens",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_tokens",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "lr_warmup_style",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "lr_wsd_decay_style",
)


def options_of_checkpoint(argv: Sequence[str]) -> list[Setting]:
    """Return the options of the model in the checkpoint of the --load flag, and those of its tokenizer unless a flag
    gives one. Flags and files override them.

    [] without the flag, also if a --config file has it, and where --load has no checkpoint yet. Raises
    CheckpointError for a checkpoint that has no such options if --use-checkpoint-args asks for them; loading
    reports it otherwise.
    """
    given = {setting.path: setting.value for setting in read_flags(argv).settings}
    try:
        folder = folder_of_model(given)
        if folder is None:
            return []
        return _options_in(folder, given)
    except CheckpointError:
        if given.get(WANTED):
            raise
        return []


def _options_in(folder: str, given: Mapping) -> list[Setting]:
    """given: values of flags by path."""
    if (step := latest(folder)) is None:
        return []
    run = read_run(folder, step)
    config = saved_config(run, folder)
    values = {f"model.{name}": value for name, value in vars(config.model).items()}
    values |= {
        f"data.{name}": value for name, value in _tokenizer(folder, run, config).items()
    }
    if config.data.tokenizer_type not in (None, "NullTokenizer"):
        values.pop("model.vocab_size", None)
    # A conversion without a tokenizer records rows, of which NullTokenizer counts one as its end of document.
    is_bare = given.get("data.tokenizer_type") in (None, "NullTokenizer")
    if config.data.tokenizer_type is None and is_bare and config.model.vocab_size:
        values["model.vocab_size"] = config.model.vocab_size - 1
    # Also a default value of activation: its default depends on other options.
    values = {
        path: value for path, value in values.items() if not config.is_default(path)
    }
    values |= {"model.activation": config.model.activation} | _rows(run, config)
    # A run with a tokenizer of its own takes none of these values: not half of each.
    if any(given.get(f"data.{name}") is not None for name in TOKENIZER):
        values = {
            path: value
            for path, value in values.items()
            if not path.startswith("data.")
        }
    source = Source("script", "the checkpoint")
    return [Setting(path, value, source) for path, value in values.items()]


def _tokenizer(folder: str, run: Mapping, config: RunConfig) -> dict[str, str | None]:
    """Return the options of the tokenizer, with the copies beside the checkpoint for files that no longer exist."""
    found = {name: getattr(config.data, name) for name in TOKENIZER}
    named = [path for name in FIELDS if (path := found.get(name))]
    if all(map(os.path.exists, named)):
        return found
    copies = local_copies(place_of(folder), run)
    return found | {name: path for name, path in copies.items() if found.get(name)}


def _rows(run: Mapping, config: RunConfig) -> dict[str, int]:
    """Return the rows of the vocabulary of a model whose tokenizer has files, which may be more than its tokens.

    {} for NullTokenizer, whose --vocab-size counts no end of document, where the run had no --vocab-size, so
    that the tokenizer has as many tokens, and if run.json does not record them.
    """
    identity = run.get("identity")
    model = identity.get("model") if isinstance(identity, Mapping) else None
    rows = model.get("vocab_size") if isinstance(model, Mapping) else None
    has_files = config.data.tokenizer_type not in (None, "NullTokenizer")
    is_given = has_files and config.model.vocab_size is not None
    return {"model.vocab_size": rows} if is_given and isinstance(rows, int) else {}


def with_saved_schedule(
    config: RunConfig, run: Mapping, folder: str | None
) -> RunConfig:
    """Return the config with the schedules of learning rate and weight decay of a checkpoint's run.json.

    The end of the decay is stated in the unit of the saved run, since it may have been its length.
    """
    if not config.optimizer.use_checkpoint_opt_param_scheduler or not run:
        return config
    saved = saved_config(run, folder)
    old = saved.optimizer
    values = {f"optimizer.{name}": getattr(old, name) for name in SCHEDULE}
    values |= {f"cycle.{name}": value for name, value in vars(saved.cycle).items()}
    if not (old.lr_decay_iters or old.lr_decay_samples or old.lr_decay_tokens):
        if counts_tokens(saved):
            values["optimizer.lr_decay_tokens"] = saved.train.train_tokens
        elif saved.train.train_iters is not None:
            values["optimizer.lr_decay_iters"] = saved.train.train_iters
        else:
            values["optimizer.lr_decay_samples"] = train_span(saved.train)
    return config.with_values(
        values, Source("derived", "the schedule of the checkpoint")
    )


def saved_config(run: Mapping, folder: str | None) -> RunConfig:
    """Return the configuration in a run.json.

    Raises CheckpointError if it has none, and ConfigError if features of the run are not loaded.
    """
    if not isinstance(run.get("config"), Mapping) or "model" not in run["config"]:
        raise CheckpointError(
            f"--load {folder}: the checkpoint has no options of a training run, because an "
            "engine saved it. Give the options as flags."
        )
    left_out = sections_without_features(run, f"--load {folder}")
    return from_dict(run["config"], left_out)
