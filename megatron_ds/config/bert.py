"""`BertConfig`: how BERT's samples are made of sentences. Options that shape the model are in `model`."""

from dataclasses import dataclass

from .option import option


@dataclass(frozen=True)
class BertConfig:
    """For --model bert; the defaults are Megatron's."""

    mask_prob: float = option(0.15, above=0, below=1, help="Share of the tokens that BERT predicts.")
    mask_max_ngram: int = option(3, at_least=1, unit="words", help="Longest run of masked words; shorter runs are more "
                                 "frequent. 1 masks single words.")
    mask_whole_words: bool = option(True, help="Mask all pieces of a word together.",
                                    avoid="The missing pieces of a partly visible word are easy to predict.")
    short_seq_prob: float = option(0.1, at_least=0, at_most=1, help="Share of BERT's samples that are shorter than the "
                                   "sequence length, so that it trains on short texts, too; 0: none.")
