"""Weights in 8 bits with a scale for each block, as in folders of DeepSeek-V3: read as numbers in fp32.

    config.json        quantization_config {"quant_method": "fp8", "weight_block_size": [128, 128], …}
    NAME               float8_e4m3fn [r, c], codes
    NAME_scale_inv     fp32 [⌈r / 128⌉, ⌈c / 128⌉]

A weight is its code times the scale of its block. Both are fp32 numbers then, and their product is rounded once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ....errors import CheckpointError
from ..family import listing
from ..files.stored_tensor import StoredTensor

# A checkpoint of these was not trained at full precision.
QUANTIZED = "quantization_config"
METHOD = "fp8"
SCALE = "_scale_inv"
CODES = torch.float8_e4m3fn
SCALES = (torch.float32, torch.bfloat16)
MOST_OF_BLOCK = 1 << 20  # rows or columns
Stored = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class ScaledBlocks:
    """Rows and columns of the blocks that have one scale."""

    rows: int
    columns: int

    def of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix; blocks at its ends may be smaller."""
        rows, columns = shape
        of_rows = -(-rows // self.rows)
        of_columns = -(-columns // self.columns)
        return of_rows, of_columns


def without_scales(
    settings: Mapping[str, Any], tensors: Stored, config: Path
) -> Stored:
    """Return the tensors of a folder, those in 8 bits as fp32 numbers, without scales.

    config: the file of the settings, for messages

    Raises CheckpointError for other kinds of quantization, and for codes and scales that do not fit.
    """
    if QUANTIZED not in settings:
        return tensors
    blocks = _blocks_of(settings[QUANTIZED], config)
    scales = {name for name in tensors if name.endswith(SCALE)}
    problems = [*_lonely_scales(scales, tensors), *_misfits(tensors, blocks)]
    if problems:
        raise CheckpointError(
            f"{len(problems)} tensors of {config.parent} are no weights in 8 bits with scales of blocks of "
            f"{blocks.rows} × {blocks.columns}: {listing(problems, '; ')}. The files are damaged, or of another model: "
            "download them again."
        )
    found = {}
    for name, tensor in tensors.items():
        if name in scales:
            continue
        if tensor.dtype == CODES:
            tensor = _numbers(tensor, tensors[name + SCALE], blocks)
        found[name] = tensor
    return found


def _blocks_of(settings: Any, config: Path) -> ScaledBlocks:
    """Raises CheckpointError for weights that are quantized in another way."""
    table = settings if isinstance(settings, Mapping) else {}
    size = table.get("weight_block_size")
    numbers = size if isinstance(size, list) else []
    is_pair = len(numbers) == 2
    is_known = is_pair and all(map(_is_size, numbers))
    if table.get("quant_method") != METHOD or not is_known:
        raise CheckpointError(
            f"{config} has a {QUANTIZED} with quant_method {table.get('quant_method')!r} and weight_block_size "
            f"{size!r}: its weights are quantized in a way that is not read. Those of {METHOD!r} with blocks, such as "
            "[128, 128], are. Give the folder of the model before it was quantized, or one that transformers writes of "
            "its dequantized weights."
        )
    rows, columns = numbers
    return ScaledBlocks(rows, columns)


def _is_size(number: object) -> bool:
    """Return whether a block may have so many rows or columns."""
    return type(number) is int and 1 <= number <= MOST_OF_BLOCK


def _lonely_scales(scales: set[str], tensors: Stored) -> list[str]:
    """Return what is wrong with scales whose weight is not there, or not in 8 bits."""
    found = []
    for name in sorted(scales):
        weight = tensors.get(name.removesuffix(SCALE))
        if weight is None:
            found.append(f"{tensors[name].place} has no weight")
        elif weight.dtype != CODES:
            found.append(f"{weight.place} is in {weight.dtype}, and has a scale")
    return found


def _misfits(tensors: Stored, blocks: ScaledBlocks) -> list[str]:
    """Return what is wrong with weights in 8 bits and their scales."""
    found = []
    for name, tensor in tensors.items():
        if tensor.dtype != CODES:
            continue
        scale = tensors.get(name + SCALE)
        if scale is None:
            found.append(f"{tensor.place} has no {name + SCALE}")
        elif len(tensor.shape) != 2:
            found.append(f"{tensor.place} has shape {list(tensor.shape)}, no matrix")
        elif scale.dtype not in SCALES:
            found.append(f"{scale.place} is in {scale.dtype}, not in float32")
        elif tuple(scale.shape) != blocks.of(tensor.shape):
            needed = list(blocks.of(tensor.shape))
            shape = list(scale.shape)
            found.append(f"{scale.place} has shape {shape} and {needed} is needed")
    return found


def _numbers(
    codes: StoredTensor, scale: StoredTensor, blocks: ScaledBlocks
) -> StoredTensor:
    read = lambda: multiplied(codes.read(), scale.read(), blocks)
    return replace(codes, dtype=torch.float32, read=read)


def multiplied(
    codes: torch.Tensor, scale: torch.Tensor, blocks: ScaledBlocks
) -> torch.Tensor:
    """codes [r, c], scale of each block → their products, fp32 [r, c]."""
    rows, columns = codes.shape
    numbers = codes.float()
    of_columns = scale.float().repeat_interleave(blocks.columns, 1)[:, :columns]
    # The rows of whole blocks, then those of the last one.
    whole = rows // blocks.rows
    at = whole * blocks.rows
    of_blocks = numbers[:at].view(whole, blocks.rows, columns)
    of_blocks.mul_(of_columns[:whole, None])
    if at < rows:
        numbers[at:].mul_(of_columns[whole])
    return numbers
