"""The classes of optimizers that other programs' names are made of."""

from .adagrad import Adagrad
from .lamb import Lamb, LambRule
from .lion import Lion

__all__ = ["Adagrad", "Lamb", "LambRule", "Lion"]
