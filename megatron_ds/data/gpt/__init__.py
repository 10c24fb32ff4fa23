"""The samples of a GPT: documents in one stream or packed, their order, fill in the middle, and batches."""
