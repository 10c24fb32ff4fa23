"""The number formats of a module in an engine: its parameters have that of the config, its buffers their own.

    "bf16": {"enabled": true}                            parameters in bf16; buffers as they come
    "data_types": {"keep_in_fp32_modules": "auto",       parameters and buffers that stay fp32 (see below)
                   "buffer_dtype": "bf16"}               cast the other buffers

Buffers hold tables whose precision counts, such as the frequencies of rotary embeddings: in bf16 the angle of
position 2000 is wrong by radians. Running statistics of torch's BatchNorm and InstanceNorm have the format of
their weights: torch computes with both in one kernel.

keep_in_fp32_modules is a list of patterns, in which * stands for any characters and which may match anywhere
in the name of a parameter or buffer; [] keeps none. "auto", the default, takes the lists of transformers'
models: `_keep_in_fp32_modules_strict`, and for fp16 `_keep_in_fp32_modules`. (DeepSpeed 0.19.8 keeps the
buffers of these lists only, and transformers parameters too.)
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...errors import ConfigError
from .module_specs import name_of, named_parameters

BLOCK = "data_types"
KEEP = "keep_in_fp32_modules"
BUFFERS = "buffer_dtype"
AUTO = "auto"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALVES = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class NumberFormats:
    """What a config adds to the format of parameters.

    keep     patterns of names that stay fp32; None: the lists of the module
    buffers  dtype of the other floating-point buffers; None: the one that they have
    """

    keep: tuple[str, ...] | None = None
    buffers: torch.dtype | None = None

    def kept(self, module: nn.Module, dtype: torch.dtype | None) -> "NamesInFp32":
        """Return what stays fp32 in a module whose parameters get `dtype`."""
        if dtype is None or dtype not in HALVES:
            return NamesInFp32(())
        return NamesInFp32(
            _patterns_of(module, dtype)
            if self.keep is None
            else map(_expression, self.keep)
        )

    def apply(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Give the parameters and buffers of a module their formats, on "meta" too."""
        kept = self.kept(module, dtype)
        for name, p in named_parameters(module):
            if p.is_floating_point():
                p.data = p.data.to(torch.float32 if name in kept else dtype)
        statistics = _formats_of_statistics(module)
        for name, buffer in module.named_buffers():
            wanted = torch.float32 if name_of(name) in kept else self.buffers
            wanted = statistics.get(id(buffer), wanted)
            if buffer.is_floating_point() and wanted is not None:
                buffer.data = buffer.data.to(wanted)


class NamesInFp32:
    """The names that one of some expressions matches anywhere. expressions: regular ones"""

    def __init__(self, expressions: Sequence[str] | Iterator[str]):
        self._pattern = None
        # The order of a set differs between processes.
        found = sorted(set(expressions))
        if found:
            self._pattern = re.compile("|".join(found))

    def __contains__(self, name: str) -> bool:
        if self._pattern is None:
            return False
        return self._pattern.search(name) is not None

    def __bool__(self) -> bool:
        return self._pattern is not None


def formats_of(
    name: str, block: Mapping[str, Any]
) -> tuple[NumberFormats, dict[str, Any]]:
    """(the formats, the block without their keys) of a config. Raises ConfigError for a wrong value."""
    data_types = block.get(BLOCK)
    if not isinstance(data_types, Mapping):
        return NumberFormats(), dict(block)
    keep = data_types.get(KEEP, AUTO)
    buffers = data_types.get(BUFFERS)
    is_list = isinstance(keep, list | tuple) and all(
        isinstance(pattern, str) for pattern in keep
    )
    if keep != AUTO and not is_list:
        raise ConfigError(
            f'{name}: "{BLOCK}.{KEEP}" is {keep!r}: it is "auto", or a list of patterns of '
            "names, in which * stands for any characters."
        )
    if buffers is not None and buffers not in DTYPES:
        raise ConfigError(
            f'{name}: "{BLOCK}.{BUFFERS}" is {buffers!r}: it is one of {", ".join(DTYPES)}.'
        )
    rest = {
        key: value for key, value in data_types.items() if key not in (KEEP, BUFFERS)
    }
    of_buffers = None if buffers is None else DTYPES[buffers]
    formats = NumberFormats(None if keep == AUTO else tuple(keep), of_buffers)
    others = {key: value for key, value in block.items() if key != BLOCK}
    return formats, others | ({BLOCK: rest} if rest else {})


def has_list(kind: nn.Module, dtype: torch.dtype | None) -> bool:
    """Return whether a module itself, not one inside of it, names what stays fp32 beside `dtype`."""
    if dtype not in HALVES:
        return False
    return any(True for _ in _own_patterns(kind, dtype))


def _formats_of_statistics(module: nn.Module) -> dict[int, torch.dtype]:
    """id of each buffer that torch reads together with a weight → the format of this weight."""
    formats = {}
    for inner in module.modules():
        if not isinstance(inner, _NormBase) or not inner.affine:
            continue
        dtype = inner.weight.dtype
        for buffer in inner.buffers(recurse=False):
            formats[id(buffer)] = dtype
    return formats


def _patterns_of(module: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    """Yield the expressions of all modules inside, for names that begin at the outermost one."""
    for path, inner in module.named_modules():
        path = name_of(path)
        for expression in _own_patterns(inner, dtype):
            yield rf"^{re.escape(path)}\..*{expression}" if path else expression


def _own_patterns(module: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    names = ["_keep_in_fp32_modules_strict"]
    if dtype == torch.float16:
        names.append("_keep_in_fp32_modules")
    for name in names:
        found = getattr(module, name, None)
        if isinstance(found, list | tuple | set | frozenset):
            yield from map(_expression, found)


def _expression(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", ".*")
