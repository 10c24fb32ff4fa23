"""`open_store`: a place in a store. The modules that are imported here register their functions for it."""

from . import store_folder, store_lock_file  # noqa: F401
from .store_path import UPath


def open_store(text: str) -> UPath:
    """Return the place of "s3://bucket/run". Keys and endpoints are those of the environment, as of the
    store's tools.
    """
    return UPath(text.rstrip("/"), use_listings_cache=False)
