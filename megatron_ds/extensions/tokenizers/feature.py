"""Tokenizers that are read from files: the declaration of the feature."""

from functools import partial

from ...features import Feature, Later

own = partial(Later, __package__)
FILES = f"{__package__}.file_tokenizers"
FORKS = f"{__package__}.fork_tokenizers"

FEATURES = [
    Feature(
        "tokenizers",
        registers={
            "tokenizer": {
                "HuggingFaceTokenizer": FILES,
                "SentencePieceTokenizer": FILES,
                "Llama2Tokenizer": FILES,
                "GPT2BPETokenizer": FILES,
                "TokenizerFromFileWithFIM": FORKS,
                "JapaneseSentencePiece": FORKS,
                "HFTokenizer": "HuggingFaceTokenizer",
                "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
            }
        },
        provides={"special tokens": own(".special_tokens")},
    )
]
