"""Importing this module registers the optimizers."""

from .adam import make_onebit_adam
from .lamb import make_onebit_lamb
from .zero_one_adam import make_zero_one_adam

OPTIMIZERS = (make_onebit_adam, make_onebit_lamb, make_zero_one_adam)
