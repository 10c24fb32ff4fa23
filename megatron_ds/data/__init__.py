"""From text to batches.

    text/         text files → a `.bin/.idx` corpus
    chat/         conversations → tokens, and masks of the answers
    tokenizers/   text ↔ ids
    samples/      a corpus → samples of a GPT, and samples → batches
    loading/      the data flags → datasets, their cached index maps, and the batches of a rank

Importing this package imports none of them; text/ does not need torch.
"""
