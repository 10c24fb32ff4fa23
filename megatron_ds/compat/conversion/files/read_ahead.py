"""Tensors read in a known order, the next ones in threads while one is used.

Reading and packing release the interpreter, so they overlap with writing. The bytes that are read ahead are
limited. Casts are left to the copy that the user of the tensor makes, which needs no memory for them; only
float16, which cannot hold all values, is cast here, so that it is checked.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from ....host.reused_pages import reused_pages
from .stored_tensor import StoredTensor, in_dtype

THREADS = 2
# Bytes that are read and not yet used, with packed copies; one tensor may be larger.
MOST_BYTES = 500_000_000


class ReadAhead:
    """`take(0)`, `take(1)`, … return the tensors in order, each once, contiguous.

    dtypes  to which the user casts them
    done    called with the bytes of a stored tensor, before the cast, when it is taken
    """

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        dtypes: Sequence[torch.dtype],
        done: Callable[[int], object] = lambda count: None,
    ):
        self._tensors = tensors
        self._dtypes = dtypes
        self._done = done
        self._pool = ThreadPoolExecutor(THREADS, "read-ahead")
        self._waiting: dict[int, Future] = {}
        self._next = 0
        self._bytes = 0
        self._memory = reused_pages()

    def __enter__(self) -> "ReadAhead":
        self._memory.__enter__()
        self._submit()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()
        self._memory.__exit__(kind, error, trace)

    def take(self, index: int) -> torch.Tensor:
        """Return the tensor at `index`. Raises CheckpointError as its reader and `in_dtype` do."""
        self._submit()
        tensor = self._waiting.pop(index).result()
        self._bytes -= self._cost(index)
        self._submit()
        self._done(self._tensors[index].nbytes)
        return tensor

    def _submit(self) -> None:
        """Start to read the next tensors, as many as the limit allows, and at least one."""
        while self._next < len(self._tensors) and (
            not self._waiting or self._bytes + self._cost(self._next) <= MOST_BYTES
        ):
            self._waiting[self._next] = self._pool.submit(self._read, self._next)
            self._bytes += self._cost(self._next)
            self._next += 1

    def _cost(self, index: int) -> int:
        """Return the bytes of the stored tensor, and of the one that it is packed into."""
        return 2 * self._tensors[index].nbytes

    def _read(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index]
        dtype = self._dtypes[index]
        values = tensor.read()
        return (
            in_dtype(values, dtype, tensor.place) if dtype == torch.float16 else values
        ).contiguous()
