"""Objects of a store that several jobs may write: each change has a condition, which the store checks with the write.

A request of a job that was suspended, or one that the store's library sends again, may arrive when another job has
long taken over. It then changes nothing, as the object is not the one that its sender has read.

    S3                  If-None-Match, If-Match
    Google's store      ifGenerationMatch
    others of fsspec    a comparison before the write, which does not exclude a change between the two
"""

import hashlib
import time
from dataclasses import dataclass
from typing import Any, Protocol

from fsspec import AbstractFileSystem

from .store_path import UPath

PAUSES = (0.1, 1.0)  # seconds before a write that failed is tried again
READS = 10  # of an object that changes while it is read


@dataclass(frozen=True)
class ReadObject:
    """An object as it was read. version: changes with each write."""

    content: bytes
    version: str


class Conditions(Protocol):
    """Conditional requests of one kind of store. Each raises an error of any class if the condition does not hold."""

    def version(self, path: UPath) -> str:
        """Return the version of an object. Raises FileNotFoundError."""

    def replace(self, path: UPath, content: bytes, version: str) -> None:
        """Write the object if it has this version."""

    def remove(self, path: UPath, version: str) -> None:
        """Remove the object if it has this version."""


def read(path: UPath) -> ReadObject | None:
    """Return the object; None when there is none."""
    conditions = conditions_of(path.fs)
    try:
        before = conditions.version(path)
        for _ in range(READS):
            content = path.fs.cat_file(path.path)
            after = conditions.version(path)
            if after == before:
                return ReadObject(content, after)
            before = after
    except FileNotFoundError:
        return None
    raise OSError(f"{path} changes all the time")


def write(path: UPath, content: bytes, found: ReadObject | None) -> bool:
    """Write the object if it is still the one that was found. found: None if there must be no object

    Returns whether it has the content.
    Raises the store's error if it is not known whether it was written. No two writers may write equal contents.
    """

    def attempt() -> None:
        if found is None:
            path.fs.pipe_file(path.path, content, mode="create")
        else:
            conditions_of(path.fs).replace(path, content, found.version)

    return _changed(path, found, content, attempt)


def remove(path: UPath, found: ReadObject) -> bool:
    """Remove the object if it is still the one that was found. Returns whether it is gone."""
    attempt = lambda: conditions_of(path.fs).remove(path, found.version)
    return _changed(path, found, None, attempt)


def _changed(
    path: UPath, found: ReadObject | None, content: bytes | None, attempt
) -> bool:
    """Attempt a change of the object that was found. Return whether it has the content; None: whether it is gone.

    After an error the object is read: the condition did not hold, or the answer was lost.
    """
    for pause in (*PAUSES, None):
        try:
            attempt()
            return True
        except Exception:
            now = read(path)
            if (now and now.content) == content:
                return True
            if now != found:
                return False
            if pause is None:
                raise
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


class _S3:
    def version(self, path: UPath) -> str:
        return path.fs.info(path.path, refresh=True)["ETag"]

    def replace(self, path: UPath, content: bytes, version: str) -> None:
        path.fs.pipe_file(path.path, content, IfMatch=version)

    def remove(self, path: UPath, version: str) -> None:
        bucket, key, _ = path.fs.split_path(path.path)
        path.fs.call_s3("delete_object", Bucket=bucket, Key=key, IfMatch=version)


class _Google:
    def version(self, path: UPath) -> str:
        return path.fs.info(path.path)["generation"]

    def replace(self, path: UPath, content: bytes, version: str) -> None:
        bucket, key, _ = path.fs.split_path(path.path)
        path.fs.call(
            "POST",
            path.fs.base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o",
            bucket,
            uploadType="media",
            name=key,
            ifGenerationMatch=version,
            headers={"Content-Type": "application/octet-stream"},
            data=content,
        )

    def remove(self, path: UPath, version: str) -> None:
        bucket, key, _ = path.fs.split_path(path.path)
        path.fs.call("DELETE", "b/{}/o/{}", bucket, key, ifGenerationMatch=version)


class _Others:
    def version(self, path: UPath) -> str:
        return hashlib.sha256(path.fs.cat_file(path.path)).hexdigest()

    def replace(self, path: UPath, content: bytes, version: str) -> None:
        self._compare(path, version)
        path.fs.pipe_file(path.path, content)

    def remove(self, path: UPath, version: str) -> None:
        self._compare(path, version)
        path.fs.rm_file(path.path)

    def _compare(self, path: UPath, version: str) -> None:
        if self.version(path) != version:
            raise FileExistsError(str(path))


CONDITIONS: dict[str, Conditions] = {
    "s3": _S3(),
    "s3a": _S3(),
    "gs": _Google(),
    "gcs": _Google(),
}


def conditions_of(store: AbstractFileSystem) -> Any:
    """Return the conditional requests of a store."""
    names = (store.protocol,) if isinstance(store.protocol, str) else store.protocol
    return next((CONDITIONS[name] for name in names if name in CONDITIONS), _Others())
