"""A loss that keeps the normalizer of the softmax over the vocabulary near 1."""
