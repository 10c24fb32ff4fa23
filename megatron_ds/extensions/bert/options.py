"""The options of BERT: `BertConfig`, how sentences become samples, and `BertHeadOptions`, a part of `ModelConfig`."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option


@dataclass(frozen=True)
class BertConfig:
    """For --model bert; the defaults are Megatron's."""

    mask_prob: float = option(
        0.15,
        above=0,
        below=1,
        needs=need("model.model", "bert"),
        help="Share of the tokens that BERT predicts.",
    )
    mask_max_ngram: int = option(
        3,
        at_least=1,
        unit="words",
        needs=need("model.model", "bert"),
        help="Longest run of masked words; shorter runs are more frequent. 1 masks single words.",
    )
    mask_whole_words: bool = option(
        True,
        needs=need("model.model", "bert"),
        help="Mask all pieces of a word together.",
        avoid="The missing pieces of a partly visible word are easy to predict.",
    )
    short_seq_prob: float = option(
        0.1,
        at_least=0,
        at_most=1,
        needs=need("model.model", "bert"),
        help="Share of BERT's samples that are shorter than the sequence length, so that it trains on short "
        "texts, too; 0: none.",
    )


@dataclass(frozen=True)
class BertHeadOptions:
    """The head that `ModelConfig` has besides that over the vocabulary."""

    bert_binary_head: bool = option(
        True,
        switches={"--bert-no-binary-head": False},
        needs=need("model.model", "bert"),
        help="BERT's samples are pairs of segments, and the model predicts whether they are in the right "
        "order (--model bert).",
        avoid="Without it a sample is one run of sentences.",
    )
