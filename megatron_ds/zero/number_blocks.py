"""`Blocks`: a format in which numbers are sent, integers with one fp32 scale for each block of neighbours
(Wang et al. 2023, arXiv:2306.10209, sections 3.1 and 3.3).

    numbers     |--------- block ---------|--------- block ---------|      256 of fp32, bf16 or fp16
    encoded     codes  |-------|-------|           scales  |-|-|          8 or 4 bits each, 4 bytes each

A number that was sent differs by half a scale at most; a scale is the largest |x| of its block over 127 or 7.
Slots and shards begin and end at multiples of a block (`layout.py`): so a block belongs to one parameter and
to one rank, and what it becomes depends neither on the number of ranks nor on the size of buckets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ..config.added_weights import FROZEN_BLOCK
from ..mpu.collectives import all_gather_into_, all_to_all_
from ..mpu.group import AllOf, Group, Work
from ..ops.normal_float import bytes_of_decoding, decode_normal, encode_normal
from ..ops.quantize import dequantize, quantize

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class EncodedBlocks:
    """codes: of 8 bits, [⌈n bits / 8⌉]. scales: fp32 [n / block]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.codes.nbytes + self.scales.nbytes

    def like(self, times: int = 1) -> "EncodedBlocks":
        """Memory for `times` as many numbers."""
        return EncodedBlocks(
            self.codes.new_empty(times * len(self.codes)),
            self.scales.new_empty(times * len(self.scales)),
        )

    def copy_(self, other: "EncodedBlocks") -> None:
        """Take over codes and scales."""
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)


@dataclass(frozen=True)
class Blocks:
    """bits: of a code, 8 or 4. length: numbers of a block, even."""

    bits: int
    length: int

    def nbytes(self, numel: int) -> int:
        """Bytes of `numel` encoded numbers, a multiple of the length."""
        return sum(self.parts(numel))

    def parts(self, numel: int) -> tuple[int, int]:
        """(bytes of the codes, bytes of the scales): what two messages send."""
        return numel * self.bits // 8, numel // self.length * SCALE_BYTES

    def encode(self, x: torch.Tensor) -> EncodedBlocks:
        """x, flat, a multiple of the length, of any float dtype. One launch on a GPU."""
        return EncodedBlocks(*quantize(x, self.bits, self.length))

    def decode(self, encoded: EncodedBlocks, out: torch.Tensor) -> torch.Tensor:
        """Write the numbers into `out`, flat, and return it. One launch on a GPU."""
        return dequantize(
            encoded.scales,
            encoded.codes,
            len(out),
            self.bits,
            self.length,
            out.dtype,
            out,
        )

    def bytes_of_decoding(self, numel: int) -> int:
        """Most bytes that `decode` of so many numbers takes beside its arguments."""
        return 0

    def part(self, encoded: EncodedBlocks, start: int, stop: int) -> EncodedBlocks:
        """Numbers [start, stop), whole blocks: a view."""
        (code, scale), (code_end, scale_end) = self._place(start), self._place(stop)
        return EncodedBlocks(
            encoded.codes[code:code_end], encoded.scales[scale:scale_end]
        )

    def _place(self, number: int) -> tuple[int, int]:
        return number * self.bits // 8, number // self.length


@dataclass(frozen=True)
class NormalBlocks(Blocks):
    """The same with the 16 numbers of NF4 in place of integers (ops/normal_float.py), for weights that are kept."""

    def encode(self, x: torch.Tensor) -> EncodedBlocks:
        return EncodedBlocks(*encode_normal(x, self.length))

    def decode(self, encoded: EncodedBlocks, out: torch.Tensor) -> torch.Tensor:
        return decode_normal(encoded.codes, encoded.scales, self.length, out)

    def bytes_of_decoding(self, numel: int) -> int:
        return bytes_of_decoding(numel)


# bits of frozen weights → their format
FROZEN_BLOCKS = {
    8: Blocks(8, FROZEN_BLOCK),
    4: NormalBlocks(4, FROZEN_BLOCK),
}


def gather_into(out: EncodedBlocks, mine: EncodedBlocks, group: Group) -> Work:
    """Concatenate what the ranks have encoded. `mine` may be this rank's part of `out`. Two collectives."""
    return _both(partial(all_gather_into_, group=group, async_op=True), out, mine)


def exchange_into(out: EncodedBlocks, mine: EncodedBlocks, group: Group) -> Work:
    """Send piece i to rank i; piece j of `out` comes from rank j. Two collectives."""
    return _both(partial(all_to_all_, group=group, async_op=True), out, mine)


def _both(
    collective: Callable[..., Work], out: EncodedBlocks, mine: EncodedBlocks
) -> Work:
    return AllOf(
        [collective(out.codes, mine.codes), collective(out.scales, mine.scales)]
    )
