"""Values of our runs that follow from a checkpoint of another program: progress, tokenizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import DataConfig
from ...progress.ramps import Progress
from .files.safetensors_reader import read_json
from .files.stored_tensor import LogicalCheckpoint, StoredProgress

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
# do_lower_case of tokenizer_config.json
LOWER_CASE = {"BertWordPieceLowerCase": True, "BertWordPieceCase": False}

# Files of a tokenizer in a Hugging Face folder → type of the tokenizer and its options. The first that fits.
TOKENIZERS = (
    ("HuggingFaceTokenizer", {"tokenizer_model": "tokenizer.json"}),
    ("GPT2BPETokenizer", {"vocab_file": "vocab.json", "merge_file": "merges.txt"}),
    ("SentencePieceTokenizer", {"tokenizer_model": "tokenizer.model"}),
    ("BertWordPieceLowerCase", {"vocab_file": "vocab.txt"}),
    ("BertWordPieceCase", {"vocab_file": "vocab.txt"}),
)


def progress_in(stored: StoredProgress) -> Progress:
    """Return the progress of our run from what the source records."""
    step = stored.iteration or 0
    samples = stored.samples or 0
    skipped = min(stored.skipped_steps or 0, step)
    return Progress(
        step=step,
        samples=samples,
        tokens=stored.tokens or 0,
        scheduled_samples=samples,
        skipped_steps=skipped,
        layer_tokens=stored.tokens or 0,
    )


def updates_in(stored: StoredProgress) -> int:
    """Return the number of updates of the optimizer; the steps of the training if the source has no count of its
    own."""
    return (
        stored.num_updates if stored.num_updates is not None else stored.iteration or 0
    )


def tokenizer_options(checkpoint: LogicalCheckpoint) -> tuple[DataConfig, list[str]]:
    """Return the options of the source's tokenizer, none without one; a line for the user."""
    for kind, names in TOKENIZERS:
        if _fits(kind, names, checkpoint.tokenizer):
            paths: dict[str, Any] = {
                field: str(checkpoint.tokenizer[name]) for field, name in names.items()
            }
            if kind == "HuggingFaceTokenizer":  # with the files beside it
                paths = {field: str(Path(path).parent) for field, path in paths.items()}
            return DataConfig(tokenizer_type=kind, **paths), [
                f"tokenizer: {kind} of {', '.join(names.values())}"
            ]
    return DataConfig(), [
        "tokenizer: the source has no files of one, so the text of a token is its number; give --tokenizer-type and "
        "its files for another"
    ]


def _fits(kind: str, names: Mapping[str, str], files: Mapping[str, Path]) -> bool:
    """Return whether all files are there and, for a BERT, its case is that of `kind`. A BERT that records no case is
    lower case."""
    if not all(name in files for name in names.values()):
        return False
    if kind not in LOWER_CASE:
        return True
    about = read_json(files[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in files else {}
    return LOWER_CASE[kind] == (about.get("do_lower_case") is not False)
