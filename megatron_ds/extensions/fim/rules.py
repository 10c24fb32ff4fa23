"""Rules about fill in the middle."""

from collections.abc import Iterator

from ...config.run import RunConfig


def documents(config: RunConfig) -> Iterator[str]:
    """--fim-data needs documents, and changes their lengths."""
    data = config.data
    if not data.fim_data:
        return
    if data.mock_data:
        yield "--fim-data with --mock-data: random tokens have no text to rearrange. Remove one of the two."
    if data.pack_documents:
        yield (
            "--pack-documents with --fim-data: packed samples have no room for the special tokens. Remove "
            "one of the two; --reset-attention-mask also separates documents."
        )
