"""Rules about how samples are made of documents."""

from collections.abc import Iterator

from .messages import say
from .run import RunConfig, all_options

FIM = ("data.fim_rate", "data.fim_spm_rate", "data.fim_split_sample", "data.fim_fragment_rate", "data.fim_no_prefix",
       "data.fim_prefix_token", "data.fim_middle_token", "data.fim_suffix_token")


def fill_in_the_middle(config: RunConfig) -> Iterator[str]:
    data = config.data
    for path in FIM:
        if not data.fim_data and config.get(path) != all_options()[path].default:
            yield f"{say(config, path)} has no effect without --fim-data. Add that, or remove it."
    if data.fim_data and data.mock_data:
        yield "--fim-data with --mock-data: random tokens have no text to rearrange. Remove one."
    if data.fim_fragment_rate is not None and data.fim_split_sample is None:
        yield (f"{say(config, 'data.fim_fragment_rate')} without --fim-split-sample: documents are not cut into "
               "fragments. Add that token.")


def packing(config: RunConfig) -> Iterator[str]:
    data = config.data
    if data.pack_documents and data.mock_data:
        yield "--pack-documents with --mock-data: random samples have no documents to pack. Remove one."
    if data.pack_documents and data.fim_data:
        yield ("--pack-documents with --fim-data: packed samples have no room for the special tokens. Remove one; "
               "--reset-attention-mask also separates documents.")


SAMPLE_RULES = (fill_in_the_middle, packing)
