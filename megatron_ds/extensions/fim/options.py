"""`FimOptions`: the part of `DataConfig` of fill in the middle."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option


@dataclass(frozen=True)
class FimOptions:
    """What becomes of documents."""

    fim_data: bool = option(
        False,
        help="Fill in the middle: move the middle of documents to their end, after special tokens, so that "
        "the model learns to write between two texts.",
        avoid="It is for code completion. A sample loses one token at its end for each special token.",
    )
    fim_rate: float = option(
        0.5,
        at_least=0,
        at_most=1,
        needs=need("data.fim_data"),
        help="Share of the documents that are rearranged.",
    )
    fim_spm_rate: float = option(
        0.5,
        at_least=0,
        at_most=1,
        needs=need("data.fim_data"),
        help="Share of those in which the suffix comes first.",
    )
    fim_split_sample: str | None = option(
        None,
        needs=need("data.fim_data"),
        help="Token at which a document is cut into fragments, such as files, each rearranged separately.",
    )
    fim_fragment_rate: float | None = option(
        None,
        at_least=0,
        at_most=1,
        needs=need("data.fim_split_sample"),
        help="Share of the fragments that are rearranged. Default: --fim-rate.",
    )
    fim_no_prefix: str | None = option(
        None,
        needs=need("data.fim_data"),
        help="Do not rearrange texts that begin with this.",
    )
    fim_prefix_token: str = option(
        "<fim_prefix>",
        needs=need("data.fim_data"),
        help="Token before the prefix, or its id.",
    )
    fim_middle_token: str = option(
        "<fim_middle>",
        needs=need("data.fim_data"),
        help="Token before the middle, or its id.",
    )
    fim_suffix_token: str = option(
        "<fim_suffix>",
        needs=need("data.fim_data"),
        help="Token before the suffix, or its id.",
    )
