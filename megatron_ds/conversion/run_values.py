"""Values of our runs that follow from a checkpoint of another program: progress, tokenizer."""

from pathlib import Path

from ..config import DataConfig
from ..ramps import Progress
from .stored_tensor import LogicalCheckpoint, StoredProgress

# Files of a tokenizer in a Hugging Face folder → type of the tokenizer and its options. The first that fits.
TOKENIZERS = (
    ("HuggingFaceTokenizer", {"tokenizer_model": "tokenizer.json"}),
    ("GPT2BPETokenizer", {"vocab_file": "vocab.json", "merge_file": "merges.txt"}),
    ("SentencePieceTokenizer", {"tokenizer_model": "tokenizer.model"}),
    ("BertWordPieceLowerCase", {"vocab_file": "vocab.txt"}),
)


def progress_in(stored: StoredProgress) -> Progress:
    """The progress of our run from what the source records."""
    step = stored.iteration or 0
    samples = stored.samples or 0
    skipped = min(stored.skipped_steps or 0, step)
    return Progress(step=step, samples=samples, tokens=stored.tokens or 0, scheduled_samples=samples,
                    skipped_steps=skipped, layer_tokens=stored.tokens or 0)


def tokenizer_options(checkpoint: LogicalCheckpoint) -> tuple[DataConfig, list[str]]:
    """The options of the source's tokenizer; NullTokenizer over the rows of the vocabulary without one."""
    for kind, names in TOKENIZERS:
        if all(name in checkpoint.tokenizer for name in names.values()):
            paths = {field: str(checkpoint.tokenizer[name]) for field, name in names.items()}
            if kind == "HuggingFaceTokenizer":          # with the files beside it
                paths = {field: str(Path(path).parent) for field, path in paths.items()}
            return DataConfig(tokenizer_type=kind, **paths), [f"tokenizer: {kind} of "
                                                              f"{', '.join(names.values())}"]
    return DataConfig(), ["tokenizer: the source has no files of one; give --tokenizer-type in training"]
