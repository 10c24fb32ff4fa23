"""Optimizers besides Adam and SGD: Adagrad, LAMB, Lion and Muon."""
