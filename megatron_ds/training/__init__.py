"""A training run: start, steps, evaluation, log, checkpoints. Scripts call `pretrain.pretrain`."""
