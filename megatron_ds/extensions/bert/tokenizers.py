"""The tokenizers of Megatron's BERT."""

from ...data.tokenizers.base import TOKENIZERS
from ..tokenizers.file_tokenizers import WordPieceTokenizer


@TOKENIZERS.register("BertWordPieceLowerCase")
class BertWordPieceLowerCase(WordPieceTokenizer):
    """Text becomes lower case without accents."""

    lower = True


@TOKENIZERS.register("BertWordPieceCase")
class BertWordPieceCase(WordPieceTokenizer):
    """Text keeps case and accents."""

    lower = False
