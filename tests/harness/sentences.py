"""A corpus of sentences and a WordPiece vocabulary for them, made up on the spot."""

import random
from pathlib import Path

import numpy as np

from megatron_ds.data.text.indexed import IndexedWriter
from megatron_ds.data.tokenizers import make_tokenizer
from megatron_ds.extensions.corpora.vocabulary_training import train_word_pieces

WORDS = (
    "the a reader writer reads writes rereads rewrote slowly gladly "
    "sentence sentences of and with unread pages"
).split()


def write_sentences(
    folder: Path, documents: int = 60, seed: int = 0
) -> tuple[str, str]:
    """(prefix of the corpus, folder of the tokenizer)."""
    draw = random.Random(seed)
    texts = [
        [
            " ".join(draw.choices(WORDS, k=draw.randint(2, 9))) + "."
            for _ in range(draw.randint(1, 8))
        ]
        for _ in range(documents)
    ]
    train_word_pieces(
        [sentence for text in texts for sentence in text], 80, folder / "tokenizer"
    )
    tokenizer = make_tokenizer(
        "HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer")
    )
    with IndexedWriter(folder / "corpus_text_sentence", np.uint16) as writer:
        for text in texts:
            ids = tokenizer.encode_batch(text)
            writer.add_document(
                [i for sentence in ids for i in sentence],
                [len(sentence) for sentence in ids],
            )
    return str(folder / "corpus_text_sentence"), str(folder / "tokenizer")
