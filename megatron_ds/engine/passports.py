"""Passports for the parameters of a module that knows nothing of this package.

The name is that of `named_parameters`; a parameter that stands in several places bears the first of its names. Tensor-parallel
layers in the manner of Megatron mark a parameter with `tensor_model_parallel` (or `model_parallel`), `partition_dim` and
`partition_stride`; others are whole on every model-parallel rank. A parameter that has a `.spec` already keeps it.
"""

from collections.abc import Callable

import torch
from torch import nn

from ..errors import ConfigError
from ..mpu.collectives import broadcast_
from ..mpu.group import Group
from ..mpu.param_spec import Init, ParamSpec

Decays = Callable[[str, nn.Parameter], bool]
DrawByName = Callable[[str, int, torch.Tensor], None]
"""draw(name, start, out): fill flat `out` with elements [start, start + len(out)) of what the module calls `name`."""

NOT_DRAWN = Init("zeros")       # the values come with the module


def prepare(module: nn.Module, dtype: torch.dtype, device: torch.device, draw: DrawByName | None) -> None:
    """Bring the module into the format and to the device it trains in; its buffers get values, its parameters stay on "meta".

    Raises ConfigError where the module is in another format than the config, or belongs to an engine already.
    """
    taken = next((n for n, p in module.named_parameters() if hasattr(p, "grad_ready")), None)
    if taken:
        raise ConfigError(f"the module belongs to another engine already ({taken}). Make a new module, or go "
                          "on with that engine.")
    if dtype == torch.float32:
        odd = {n: p.dtype for n, p in module.named_parameters() if p.dtype != dtype}
        if odd:
            name = next(iter(odd))
            raise ConfigError(f"{len(odd)} parameters are not fp32 (first {name}, {odd[name]}), and the config has neither an "
                              'enabled "bf16" nor an enabled "fp16" block. Enable one, or call module.float().')
    module.to(dtype)                                        # floating ones only, on "meta" too
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if draw is None and (name := next((n for n, t in tensors if t.is_meta), None)):
        raise ConfigError(f"{name} is on the meta device, and nothing is given to draw its values with. Give "
                          "draw=function(name, start, out), for instance from_safetensors(folder).")
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device).contiguous()
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            _materialize(module, name, buffer, device, draw)
    for p in module.parameters():
        if not p.is_meta:
            p.data = p.data.to(device)


def write_passports(module: nn.Module, model: Group, decays: Decays | None) -> None:
    """Set `.spec` of every parameter that has none. decays: whether weight decay applies; None: to all, as in DeepSpeed."""
    for name, p in module.named_parameters():
        if not hasattr(p, "spec"):
            p.spec = _passport(name, p, model.size, decays is None or bool(decays(name, p)))


@torch.no_grad()
def agree(module: nn.Module, data: Group) -> None:
    """All data-parallel ranks take the values of the first: modules are often made with different seeds. Collective."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            whole = tensor.detach().contiguous()
            broadcast_(whole, data)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong into a state_dict, by the first of their names."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def _passport(name: str, p: nn.Parameter, size: int, decay: bool) -> ParamSpec:
    is_split = getattr(p, "tensor_model_parallel", False) or getattr(p, "model_parallel", False)
    if not is_split or size == 1:
        return ParamSpec(name, tuple(p.shape), NOT_DRAWN, decay=decay)
    dim = getattr(p, "partition_dim", 0)
    shape = tuple(n * size if d == dim else n for d, n in enumerate(p.shape))
    return ParamSpec(name, shape, NOT_DRAWN, split_dim=dim, parts=getattr(p, "partition_stride", 1), decay=decay)


def _materialize(module: nn.Module, name: str, buffer: torch.Tensor, device: torch.device, draw: DrawByName) -> None:
    path, _, last = name.rpartition(".")
    values = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    draw(name, 0, values.view(-1))
    module.get_submodule(path)._buffers[last] = values
