"""`CachedKeys`: keys, values and states of the texts under way, and the pasts of the batches that extend them.

    layer → keys, values [rows + 1, length, g/t, d]        row i has the tokens of text i; the last row is spare

Values that are channels of the keys, as of latents, are kept once.

Texts stand in the first rows without a gap, so that those of a batch are a view. Tokens that fill up a batch,
as sequence parallelism needs, are written to the spare row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ...batch.batch import Batch
from ...batch.recurrence import Recurrence
from ...errors import DeviceMemoryError
from ...models.attention import CoreAttention
from ...ops.key_rows import KeyRows
from .cached_states import CachedStates


class CachedKeys:
    """rows: texts at once. length: tokens of each, at most. Memory is taken with the first batch.

    states: of the same texts, of layers that keep these in place of keys
    """

    def __init__(self, rows: int, length: int):
        self.rows = rows
        self.length = length
        self.states = CachedStates(rows)
        self._layers: dict[str, tuple[Tensor, ...]] = {}
        self._flat: dict[str, tuple[Tensor, ...]] = {}  # the same, one place a row

    def place(self, row: int, position: int) -> int:
        """Return the number of a token's place among those of all rows."""
        return row * self.length + position

    @property
    def spare(self) -> int:
        """The place of tokens that belong to no text."""
        return self.place(self.rows, 0)

    @property
    def layers(self) -> list[str]:
        """Names of the layers whose keys, or states, are here."""
        return [*self._layers, *self.states.layers]

    def write(
        self, name: str, k: Tensor, v: Tensor | int, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write k and v [s, 1, g, d] of a layer to places [s]; return those of all rows, [rows + 1, length, g, d].

        v: a number of first channels of k, which are the values then
        """
        written = (k,) if isinstance(v, int) else (k, v)
        if name not in self._layers:
            self._layers[name] = self._allocated(written)
            self._flat[name] = tuple(t.flatten(0, 1) for t in self._layers[name])
        for kept, new in zip(self._flat[name], written, strict=True):
            kept.index_copy_(0, places, new[:, 0])
        of_layer = self._layers[name]
        keys = of_layer[0]
        if isinstance(v, int):
            return keys, keys[..., :v]
        return keys, of_layer[1]

    def _allocated(self, written: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return zeros for all rows: attention multiplies hidden values by 0, which gives 0 only if they are finite."""
        places = (self.rows + 1, self.length)
        shapes = [(*places, *t.shape[2:]) for t in written]
        try:
            return tuple(
                t.new_zeros(shape) for t, shape in zip(written, shapes, strict=True)
            )
        except RuntimeError as error:
            # On CPUs a lack of memory is a RuntimeError as any other, so the message repeats torch's reason.
            size = sum(map(math.prod, shapes)) * written[0].itemsize
            raise self._too_large(size, error) from error

    def _too_large(self, size: int, error: RuntimeError) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"keys and values of {self.rows:,} texts of {self.length:,} tokens take {size / 2**30:,.1f} GiB in each "
            "layer, which do not fit the memory. Generate fewer texts at once (--requests; --batch-size in serving), "
            f"or serve shorter ones (--max-length). torch: {error}"
        )

    def clear(self, rows: Sequence[int]) -> None:
        """Forget the tokens of some rows: keys that are not finite would spoil the next text there, since attention
        multiplies hidden values by 0."""
        for tensors in self._layers.values() if rows else ():
            for tensor in tensors:
                tensor[rows] = 0

    def move(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` tokens of a row, and its states, to another row."""
        self.states.move(source, target)
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[target, :count] = tensor[source, :count]


@dataclass(frozen=True, eq=False)
class PromptPast:
    """The past of a batch of prompts, in rows from `first` on: each token attends to its own prompt alone.

    places  int64 [s], where the keys of the tokens are written
    ends    int64 [prompts], the places of their last tokens in the batch
    """

    cached: CachedKeys
    places: Tensor
    wanted: Tensor
    first: int
    ends: Tensor

    def attend(
        self,
        name: str,
        core: CoreAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor | int,
        batch: Batch,
    ) -> Tensor:
        """Attention within each prompt (`batch.past.Past`)."""
        self.cached.write(name, k, v, self.places)
        return core(q, k, k[..., :v] if isinstance(v, int) else v, batch)

    def recur(self, name: str, layer: Recurrence, x: Tensor, batch: Batch) -> Tensor:
        """Run a layer on the prompts from their beginnings (`batch.past.Past`)."""
        out, states = layer.begin(x, batch, self.ends)
        self.cached.states.write(name, self.first, states)
        return out


@dataclass(frozen=True, eq=False)
class TextPast:
    """The past of a batch with the newest token of each text in some rows. rows: what each of them sees."""

    cached: CachedKeys
    places: Tensor
    wanted: Tensor
    first: int
    rows: KeyRows

    def attend(
        self,
        name: str,
        core: CoreAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor | int,
        batch: Batch,
    ) -> Tensor:
        """Attention of each token to its text (`batch.past.Past`)."""
        count = len(self.rows.places)
        visible = slice(self.first, self.first + count), slice(self.rows.length)
        # [length, b, g, d], views
        keys, values = (
            t[visible].transpose(0, 1)
            for t in self.cached.write(name, k, v, self.places)
        )
        out = core.of_rows(q[:count].transpose(0, 1), keys, values, self.rows)
        return _filled(out.transpose(0, 1), len(q))

    def recur(self, name: str, layer: Recurrence, x: Tensor, batch: Batch) -> Tensor:
        """Run a layer on the token of each text, after its state (`batch.past.Past`)."""
        count = len(self.rows.places)
        kept = self.cached.states
        before = kept.read(name, self.first, count)
        out, states = layer.proceed(x[:count].transpose(0, 1), before)
        kept.write(name, self.first, states)
        return _filled(out.transpose(0, 1), len(x))


def _filled(out: Tensor, length: int) -> Tensor:
    """Return out [tokens, 1, ..] with zeros for tokens that belong to no text, up to a length."""
    missing = length - len(out)
    if not missing:
        return out
    unchanged = (0, 0) * (out.dim() - 1)
    return F.pad(out, (*unchanged, 0, missing))
