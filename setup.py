"""Build script; everything declarative is in pyproject.toml.

The package is pure Python today: it installs without a compiler and without a GPU. Compiled parts, when they come, are
optional extensions built from csrc/ that fall back to Python where no compiler is found.
"""

from setuptools import setup

setup()
