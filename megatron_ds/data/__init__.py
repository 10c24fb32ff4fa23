"""From text to batches: tokenizers, the `.bin/.idx` corpus, the order of its samples, and the batches of a rank.

Importing the package imports nothing; the parts that only preprocess text do not need torch.
"""
