"""Rules about the data: its source, and the samples made of it."""

import re
from collections.abc import Iterator, Sequence

from ..run import RunConfig

SPLIT_PATHS = ("data.train_data_path", "data.valid_data_path", "data.test_data_path")


def corpus(config: RunConfig) -> Iterator[str]:
    """The data come from one source, with a tokenizer; splits and blend weights match that source."""
    # One source.
    data = config.data
    paths = [path for path in SPLIT_PATHS if config.get(path)]
    sources = (
        "data.mock_data",
        "data.data_path",
        *paths[:1],
        "data.data_args_path",
        "data.per_split_data_args_path",
    )
    chosen = [f"[{path}]" for path in sources if config.get(path)]
    if not chosen and not config.plan.is_dry:  # a plan can come before its data
        yield (
            "missing: the data. Give --data-path PREFIX, or --train-data-path and so on for each split, "
            "or --mock-data to train on random tokens."
        )
    elif len(chosen) > 1:
        how_many = "both" if len(chosen) == 2 else "all"
        hint = "; --mock-data on the command line replaces the others"
        yield (
            f"{' and '.join(chosen)} {how_many} choose the training data. "
            f"Give only one{hint if data.mock_data else ''}."
        )
    # Parts of the source.
    if data.split is not None and not _is_split(data.split):
        yield (
            "[split] is not a list of up to three proportions, none negative and not all zero. Use for "
            "instance 969,30,1, or 98,2,0 for no test set."
        )
    if paths and not data.train_data_path:
        yield f"[{paths[0]}] without --train-data-path: there is no training data. Add --train-data-path."
    # Weights of a blend.
    words = next(filter(None, (data.data_path, data.train_data_path)), ())
    if data.blend_weights == "epochs" and (data.mock_data or _has_no_weights(words)):
        yield (
            "[blend_weights] needs a weight before each prefix: the number of epochs of that corpus. Add "
            "the weights."
        )
    # The tokenizer.
    if chosen and not data.mock_data and data.tokenizer_type is None:
        yield (
            "missing: --tokenizer-type, the tokenizer that the corpus was tokenized with (NullTokenizer "
            "for bare ids)."
        )
    if data.tokenizer_type == "NullTokenizer" and config.model.vocab_size is None:
        yield "missing: --vocab-size. [tokenizer_type] has no vocabulary file to read it from."


def _has_no_weights(words: Sequence[str]) -> bool:
    """Whether a data path is prefixes alone. False for a file, which is read when the data are opened."""
    return bool(words) and not words[0].startswith("@") and not is_number(words[0])


def is_number(text: str) -> bool:
    """Whether a word of --data-path is a weight rather than a prefix."""
    try:
        return float(text) is not None
    except ValueError:
        return False


def _is_split(text: str) -> bool:
    """Up to three numbers between commas, blanks or slashes; as `data/loading/sources.py` reads them."""
    numbers = re.split(r"[\s,/]+", text.strip(" ,/"))
    return (
        len(numbers) <= 3
        and all(re.fullmatch(r"\d+\.?\d*|\.\d+", n) for n in numbers)
        and any(float(n) for n in numbers)
    )


def _is_of_other_things(config: RunConfig) -> bool:
    """Whether the loss is no mean over tokens."""
    return config.objective is not None and not config.objective.is_of_tokens


def packing(config: RunConfig) -> Iterator[str]:
    """--pack-documents excludes --mock-data, which has no documents."""
    data = config.data
    if data.sft and data.mock_data:
        yield "--sft with --mock-data: random tokens have no answers. Remove one of the two."
        return
    if data.sft and not data.pack_documents:
        yield "[pack_documents] with --sft: a row would hold parts of conversations. Remove it."
    is_alone = data.sft and not _is_of_other_things(config)
    if is_alone and not config.train.calculate_per_token_loss:
        yield (
            "[calculate_per_token_loss] with --sft: the tokens of short answers would have more weight than those "
            "of long ones. Remove it."
        )
    if data.pack_documents and data.mock_data:
        yield (
            "--pack-documents with --mock-data: random samples have no documents to pack. Remove one of "
            "the two."
        )


DATA_RULES = (
    corpus,
    packing,
)
