"""Blocks whose layers beside attention are two functions of autograd, so that the host launches them faster."""
