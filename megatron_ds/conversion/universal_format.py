"""The format "deepspeed-universal", in the table of formats."""

from .deepspeed_format import UNIVERSAL_FORMAT as FORMAT

__all__ = ["FORMAT"]
