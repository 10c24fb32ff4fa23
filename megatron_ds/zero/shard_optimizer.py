"""`ShardOptimizer`: torch optimizers on the pieces of parameters that this rank updates.

Nothing distributed enters torch's optimizers: they see fp32 tensors (`Leaf.tensor`), the masters of pieces.
These are 1-D and padded to whole vectors (padding has value and gradient zero and stays so), or, for an
optimizer that needs whole tensors, whole parameters in their shape. State exists from the start, so that a
checkpoint can be loaded into it.

An optimizer of this package, a `PartOptimizer`, declares how it takes a step. Others are torch's or a user's, and one
whose state does not begin with zeros `Restarts` before the first update.

Note: grad_scale. A fused optimizer of torch divides each gradient by its attribute `grad_scale` while it reads
it, and writes the quotient back to `.grad`; unscaling and clipping then need no pass of their own. One that
`takes_numbers` takes a number in place of a tensor, and writes nothing back. For other optimizers, and only if
there is something to divide, the gradients are multiplied beforehand.

Note: low_grad. Gradients of another dtype than the masters are `Leaf.tensor.low_grad`. An optimizer that
`reads_low_grad` reads them there; others get an fp32 copy for the time of the update.

Note: low. In a 16-bit model `Leaf.tensor.low` is the part of the model's weight whose master the leaf is. An
optimizer that `writes_low` writes it during the update, from the new value in registers; after others it is
cast.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ..errors import ConfigError
from ..mpu.managed_parameter import described
from ..mpu.param_spec import ParamSpec
from ..optim import MakeOptimizer, ParamGroup, group_of
from ..optim.optimizers import traits_of
from ..optim.part_optimizer import (
    HalvedOptimizer,
    PartOptimizer,
    Restarts,
    parameters_of,
)
from .layout import SlotPiece
from .leaf_tensor import LeafTensor

if TYPE_CHECKING:
    from .parameter_norms import ParameterNorms
    from .whole_matrices import WholeMatrices

Rates = float | Mapping[str, float] | None
"""Learning rates by name (`ParamGroup.rate`), one for all groups, or None: torch's groups have their own."""


@dataclass(frozen=True)
class Leaf:
    """The master of `piece`.

    tensor  its .grad or .low_grad is a view of the gradient buffer
    shape   of the tensor, if it is a whole parameter; None: flat, with padding
    """

    spec: ParamSpec
    piece: SlotPiece
    tensor: LeafTensor
    shape: tuple[int, ...] | None = None

    def unpadded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the form of `tensor` as a flat view without padding."""
        return tensor.view(-1)[: self.piece.stop - self.piece.start]


def make_leaf(
    spec: ParamSpec,
    piece: SlotPiece,
    master: torch.Tensor,
    grad: torch.Tensor | None = None,
    low: torch.Tensor | None = None,
    shape: tuple[int, ...] | None = None,
) -> Leaf:
    """master, grad, low: flat, padding included. shape: for an optimizer that needs the parameter whole.

    grad: a view of the gradient buffer.
    """
    tensor = cast(LeafTensor, described(_shaped(master, piece, shape), spec))
    tensor.piece = piece
    tensor.low_grad = None
    tensor.low = None if low is None else _shaped(low, piece, shape)
    if grad is not None and grad.dtype == master.dtype:
        tensor.grad = _shaped(grad, piece, shape)
    elif grad is not None:
        tensor.low_grad = _shaped(grad, piece, shape)
    return Leaf(spec, piece, tensor, shape)


@contextmanager
def _wide_grads(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, parameters of an optimizer that does not read `low_grad` have an fp32 copy of it as `grad`."""
    widened = []
    if not (isinstance(optimizer, PartOptimizer) and optimizer.reads_low_grad):
        for tensor in parameters_of(optimizer):
            low_grad = getattr(tensor, "low_grad", None)
            if low_grad is not None:
                tensor.grad = low_grad.float()
                widened.append(tensor)
    try:
        yield
    finally:
        for tensor in widened:
            tensor.grad = None


def _shaped(
    flat: torch.Tensor, piece: SlotPiece, shape: tuple[int, ...] | None
) -> torch.Tensor:
    return flat if shape is None else flat[: piece.stop - piece.start].view(shape)


class ShardOptimizer:
    """The torch optimizers of the parameter groups, on the leaves that this rank has of them.

    Groups of the same optimizer share one torch optimizer. A rank without leaves of an optimizer does not
    make it, unless its step is collective: it then has empty groups.

    norms, matrices: what collective optimizers are given, the matrices by optimizer
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        leaves: Sequence[Leaf],
        norms: "ParameterNorms | None" = None,
        matrices: "Mapping[MakeOptimizer, WholeMatrices] | None" = None,
    ):
        self.num_updates = 0
        self._norms = norms
        self._matrices = matrices or {}
        members: list[list[nn.Parameter]] = [[] for _ in groups]
        for leaf in leaves:
            members[groups.index(group_of(leaf.spec, groups))].append(leaf.tensor)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._of: dict[int, torch.optim.Optimizer] = {}
        self._maker_of: dict[int, MakeOptimizer] = {}
        for i, group in enumerate(groups):
            same = [
                (g, tensors)
                for g, tensors in zip(groups, members)
                if g.optimizer == group.optimizer
                and (tensors or group.traits.is_collective)
            ]
            is_first = all(g.optimizer != group.optimizer for g in groups[:i])
            if same and is_first:
                self._make(same)
        # Torch optimizers create their state in the first step: take one that moves nothing (gradients are
        # zero yet).
        for optimizer in self._optimizers:
            for numbers in optimizer.param_groups:
                numbers["lr"], numbers["weight_decay"] = 0.0, 0.0
            with torch.no_grad(), _wide_grads(optimizer):
                optimizer.step()
        self.set_num_updates(0)

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The torch optimizers of this rank."""
        return self._optimizers

    def step(self, lr: Rates, weight_decay: float, divisor: float) -> None:
        """Update with gradient / divisor; afterwards the contents of the gradients are undefined.

        weight_decay: of the groups that decay. lr None: the torch parameter groups keep their own of both.
        """
        self.num_updates += 1
        for optimizer in self._optimizers:
            with self._prepared(optimizer, lr, weight_decay, divisor):
                optimizer.step()

    def begin(
        self, lr: Rates, weight_decay: float, divisor: float, norms: "ParameterNorms"
    ) -> dict[MakeOptimizer, torch.Tensor]:
        """Make the first half of a `step` of an optimizer that needs norms of more parts than these leaves; other
        optimizers make their step. → for each optimizer the squares of the norms (`ParameterNorms.squares`).
        """
        self.num_updates += 1
        squares = {}
        for optimizer in self._optimizers:
            maker = self._maker_of[id(optimizer)]
            with self._prepared(optimizer, lr, weight_decay, divisor):
                if not traits_of(maker).needs_norms:
                    optimizer.step()
                    continue
                halved = _halved(optimizer)
                halved.advance()
                squares[maker] = norms.squares(*halved.measured())
        return squares

    def finish(
        self, reduced: Mapping[MakeOptimizer, torch.Tensor], norms: "ParameterNorms"
    ) -> None:
        """The second half. reduced: the norms of all parts (`ParameterNorms.reduced`), for each optimizer."""
        for optimizer in self._optimizers:
            if (maker := self._maker_of[id(optimizer)]) in reduced:
                squares = reduced[maker]
                halved = _halved(optimizer)
                halved.finish(norms.of(squares, parameters_of(optimizer)))

    def set_beta1(self, beta1: float) -> None:
        """beta1 of the following updates, of optimizers that have betas."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if "betas" in group:
                    group["betas"] = (beta1, *group["betas"][1:])

    def writes_low(self, leaf: Leaf) -> bool:
        """Return whether the update writes the model's 16-bit weight too."""
        optimizer = self._of[id(leaf.tensor)]
        return isinstance(optimizer, PartOptimizer) and optimizer.writes_low

    def optimizer_of(self, leaf: Leaf) -> torch.optim.Optimizer:
        """Return the torch optimizer that updates a leaf."""
        return self._of[id(leaf.tensor)]

    def state_of(self, leaf: Leaf) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the optimizer's tensors with as many elements as the leaf: (name, tensor)."""
        for name, value in self._of[id(leaf.tensor)].state[leaf.tensor].items():
            if (
                torch.is_tensor(value)
                and value.numel() == leaf.tensor.numel()
                and name != "step"
            ):
                yield name, value

    def place_state(self, leaf: Leaf, name: str, tensor: torch.Tensor) -> None:
        """Replace one of `state_of` by `tensor`."""
        self._of[id(leaf.tensor)].state[leaf.tensor][name] = tensor

    def set_num_updates(self, count: int) -> None:
        """Continue as after `count` updates: bias corrections depend on it."""
        self.num_updates = count
        for optimizer in self._optimizers:
            if isinstance(optimizer, PartOptimizer):
                optimizer.num_updates = count
            for state in optimizer.state.values():
                if torch.is_tensor(state.get("step")):
                    state["step"].fill_(count)
                elif "step" in state:
                    state["step"] = count

    def _make(self, groups: Sequence[tuple[ParamGroup, list[nn.Parameter]]]) -> None:
        first = groups[0][0]
        options: dict[str, Any] = {}
        if first.traits.needs_norms:
            options["reduce_norms"] = self._norms
        if first.traits.needs_matrices:
            options["for_each"] = self._matrices[first.optimizer]
        optimizer = first.optimizer(
            [
                {
                    "params": tensors,
                    "decay": group.decay,
                    "lr_factor": group.lr_factor,
                    "rate": group.rate,
                }
                for group, tensors in groups
            ],
            **options,
        )
        self._optimizers.append(optimizer)
        self._maker_of[id(optimizer)] = first.optimizer
        for _, tensors in groups:
            self._of |= {id(tensor): optimizer for tensor in tensors}

    @contextmanager
    def _prepared(
        self,
        optimizer: torch.optim.Optimizer,
        lr: Rates,
        weight_decay: float,
        divisor: float,
    ) -> Iterator[None]:
        """Inside, an optimizer has the numbers of a step, and gradients that it can read."""
        if self.num_updates == 1 and isinstance(optimizer, Restarts):
            optimizer.restart()
        for group in optimizer.param_groups if lr is not None else ():
            rate = lr[group["rate"]] if isinstance(lr, Mapping) else lr
            group["lr"] = rate * group["lr_factor"]
            group["weight_decay"] = weight_decay if group["decay"] else 0.0
        with _wide_grads(optimizer):
            self._set_divisor(optimizer, divisor)
            yield

    @staticmethod
    def _set_divisor(optimizer: torch.optim.Optimizer, divisor: float) -> None:
        tensors = parameters_of(optimizer)
        if not tensors:
            return
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            takes_numbers = (
                isinstance(optimizer, PartOptimizer) and optimizer.takes_numbers
            )
            scale: float | torch.Tensor | None = None if divisor == 1.0 else divisor
            if divisor != 1.0 and not takes_numbers:
                scale = torch.full(
                    (), divisor, dtype=torch.float32, device=tensors[0].device
                )
            vars(optimizer)["grad_scale"] = scale
        elif divisor != 1.0:
            grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
            torch._foreach_mul_(grads, 1.0 / divisor)


def _halved(optimizer: torch.optim.Optimizer) -> HalvedOptimizer:
    if not isinstance(optimizer, HalvedOptimizer):
        raise ConfigError(
            f"{type(optimizer).__name__} declares norms of parameters of which it updates one part after the "
            "other, but it is no HalvedOptimizer (optim/part_optimizer.py). Derive it from that class."
        )
    return optimizer
