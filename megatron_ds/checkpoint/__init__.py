"""Checkpoints of logical tensors: save under one layout, load under any other."""
