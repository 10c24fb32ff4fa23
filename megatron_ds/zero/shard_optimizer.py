"""`InnerOptimizer`: a torch optimizer on the pieces of parameters that this rank updates.

It keeps torch's optimizer free of everything distributed: the optimizer sees 1-D fp32 `Leaf.tensor`s, masters of a parameter
or of a part of one, padded to whole vectors (padding has value and gradient zero and stays so). State exists from the start,
so that a checkpoint can be loaded into it.

Note: restart. An optimizer whose state does not begin with zeros has a method `restart`, called before the first update: it
puts the state in place that the optimizer begins with.

Note: grad_scale. A fused optimizer divides each gradient by its attribute `grad_scale` while it reads it, and writes the
quotient back to `.grad`; unscaling and clipping then cost no pass of their own. Where that is not supported, and only when
there is something to divide, the gradients are multiplied beforehand.

Note: low. Where the model has 16 bits, `Leaf.tensor.low` is the part of it that the leaf is the master of. An optimizer with
the attribute `writes_low` writes it during the update, while the new value is at hand; after others it must be cast.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..mpu.param_spec import ParamSpec
from .layout import SlotPiece

MakeOptimizer = Callable[[list[dict]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Leaf:
    """The master of `piece`; tensor.grad is a view of the gradient buffer, tensor.spec the parameter's spec, tensor.piece the
    piece, tensor.low the model's own weight if that has 16 bits, else None."""

    spec: ParamSpec
    piece: SlotPiece
    tensor: nn.Parameter


def make_leaf(spec: ParamSpec, piece: SlotPiece, master: torch.Tensor, grad: torch.Tensor | None = None,
              low: torch.Tensor | None = None) -> Leaf:
    """grad: a view of the gradients; in another dtype than fp32 they are lent for the update only."""
    tensor = nn.Parameter(master)
    tensor.spec, tensor.piece, tensor.low = spec, piece, low
    if grad is not None and grad.dtype == master.dtype:
        tensor.grad = grad
    return Leaf(spec, piece, tensor)


class InnerOptimizer:
    """make_optimizer gets parameter groups {"params": [...], "decay": bool}; a rank may have no leaves, hence no optimizer."""

    def __init__(self, make_optimizer: MakeOptimizer, leaves: Sequence[Leaf]):
        self.num_updates = 0
        groups = [{"params": [leaf.tensor for leaf in leaves if leaf.spec.decay is decay], "decay": decay}
                  for decay in (True, False)]
        groups = [group for group in groups if group["params"]]
        self.optimizer = make_optimizer(groups) if groups else None
        self.writes_low = getattr(self.optimizer, "writes_low", False)
        self._divides = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        self._create_state()

    def step(self, lr: float | None, weight_decay: float, divisor: float) -> None:
        """Update with gradient / divisor; the gradients are used up.

        weight_decay applies to the groups that decay. lr None: the groups keep the values that they have of both.
        """
        self.num_updates += 1
        if self.optimizer is None:
            return
        if self.num_updates == 1 and hasattr(self.optimizer, "restart"):
            self.optimizer.restart()
        for group in self._groups() if lr is not None else ():
            group["lr"], group["weight_decay"] = lr, weight_decay if group["decay"] else 0.0
        self._set_divisor(divisor)
        self.optimizer.step()

    def state_of(self, leaf: Leaf) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimizer's tensors as long as the leaf: (name, tensor)."""
        for name, value in self.optimizer.state[leaf.tensor].items():
            if torch.is_tensor(value) and value.numel() == leaf.tensor.numel() and name != "step":
                yield name, value

    def place_state(self, leaf: Leaf, name: str, tensor: torch.Tensor) -> None:
        """One of `state_of` is `tensor` from now on."""
        self.optimizer.state[leaf.tensor][name] = tensor

    def set_num_updates(self, count: int) -> None:
        """Go on as if `count` updates had been made: bias corrections depend on it."""
        self.num_updates = count
        for state in self.optimizer.state.values() if self.optimizer else ():
            if torch.is_tensor(state.get("step")):
                state["step"].fill_(count)
            elif "step" in state:
                state["step"] = count

    def _groups(self) -> list[dict]:
        return self.optimizer.param_groups

    def _set_divisor(self, divisor: float) -> None:
        if self._divides:
            device = self._groups()[0]["params"][0].device
            self.optimizer.grad_scale = None if divisor == 1.0 else torch.tensor(divisor, dtype=torch.float32, device=device)
        elif divisor != 1.0:
            torch._foreach_mul_([tensor.grad for group in self._groups() for tensor in group["params"]], 1.0 / divisor)

    def _create_state(self) -> None:
        """Torch optimizers create their state in the first step: take one that moves nothing (gradients are still zero)."""
        if self.optimizer is None:
            return
        for group in self._groups():
            group["lr"], group["weight_decay"] = 0.0, 0.0
        with torch.no_grad():
            self.optimizer.step()
        self.set_num_updates(0)
