"""Values that follow from other values, and options that have no effect beside them.

Each function returns a config. What it switches off because there is nothing to do is noted in `RunConfig.without_effect`,
which startup prints.
"""

from dataclasses import replace

from .messages import say
from .run import RunConfig, Source, all_options

DATA = ("data.data_path", "data.split", "data.train_data_path", "data.valid_data_path", "data.test_data_path",
        "data.data_args_path", "data.per_split_data_args_path", "data.blend_weights")
TOKENIZER_FILES = ("data.vocab_file", "data.merge_file", "data.tokenizer_model")
GPT2_TOKENS = 50_256                  # beside the end-of-document token, which NullTokenizer adds


def resolved(config: RunConfig) -> RunConfig:
    for function in (_mock_data, _mock_vocabulary, _recomputation, _gradient_divisor, _saving):
        config = function(config)
    return config


def _mock_data(config: RunConfig) -> RunConfig:
    """The flag --mock-data wins over the corpus of a recipe. From a file it does not: `rules` then asks to decide."""
    source = config.sources.get("data.mock_data")
    if config.data.mock_data and source is not None and source.kind == "flag":
        return _without(config, DATA, "--mock-data is used instead")
    return config


def _mock_vocabulary(config: RunConfig) -> RunConfig:
    """Mock tokens need a vocabulary size, but no tokenizer: that of a recipe is left out if --vocab-size is given."""
    if not config.data.mock_data:
        return config
    source = config.sources.get("data.mock_data")
    is_flag = source is not None and source.kind == "flag"
    if is_flag and config.model.vocab_size is not None and config.data.tokenizer_type not in (None, "NullTokenizer"):
        config = _without(config, ("data.tokenizer_type", *TOKENIZER_FILES), "mock data needs no tokenizer")
    if config.data.tokenizer_type is not None:
        return config
    config = config.with_values({"data.tokenizer_type": "NullTokenizer"}, Source("derived", "for --mock-data"))
    has_files = bool(config.data.vocab_file or config.data.merge_file)
    config = _without(config, TOKENIZER_FILES, "mock data needs no tokenizer")
    if has_files and config.model.vocab_size is None:
        name = "GPT-2's vocabulary, for --mock-data"
        config = config.with_values({"model.vocab_size": GPT2_TOKENS}, Source("derived", name))
    return config


def _recomputation(config: RunConfig) -> RunConfig:
    train = config.train
    if train.recompute_method == "uniform" and train.recompute_num_layers == 1:       # layers one by one, and all of them
        return replace(config, train=replace(train, recompute_num_layers=None))
    return config


def _gradient_divisor(config: RunConfig) -> RunConfig:
    """Dividing gradients while they are summed only prevents an overflow of fp16."""
    dtype = config.zero.communication_data_type or config.optimizer.main_grads_dtype
    if dtype == "fp16":
        return config
    return _without(config, ("zero.prescale_gradients", "zero.gradient_predivide_factor"),
                    f"gradients are summed in {dtype}, which cannot overflow as fp16 does")


def _saving(config: RunConfig) -> RunConfig:
    if config.checkpoint.save is not None:
        return config
    return _without(config, ("checkpoint.save_interval", "checkpoint.save_total_limit", "checkpoint.no_save_optim"),
                    "no checkpoint is written without --save DIR")


def _without(config: RunConfig, paths: tuple[str, ...], why: str) -> RunConfig:
    """The options at their defaults; those that were given are noted."""
    given = [path for path in paths if config.get(path) != all_options()[path].default]
    if not given:
        return config
    notes = {say(config, path): why for path in given}
    defaults = {path: all_options()[path].default for path in given}
    config = config.with_values(defaults, Source("derived", why))
    sources = {path: source for path, source in config.sources.items() if path not in given}
    return replace(config, sources=sources, without_effect={**config.without_effect, **notes})
