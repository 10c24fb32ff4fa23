"""`BertConfig`: how BERT's samples are made of sentences. What decides the shape of the model is in `model`."""

from dataclasses import dataclass

from .option import option


@dataclass(frozen=True)
class BertConfig:
    """For --model bert; the defaults are Megatron's."""

    mask_prob: float = option(0.15, above=0, below=1, help="Share of the tokens that BERT must guess.")
    mask_max_ngram: int = option(3, at_least=1, unit="words", help="Masked words come in runs of up to so many; shorter ones "
                                 "more often. 1 masks words one by one.")
    mask_whole_words: bool = option(True, help="Mask all pieces of a word together.",
                                    avoid="Pieces of a word that is half visible are easily guessed.")
    short_seq_prob: float = option(0.1, at_least=0, at_most=1, help="Share of BERT's samples that are shorter than the "
                                   "sequence, so that it sees short texts as well; 0 for none.")
