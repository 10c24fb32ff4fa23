"""What a program may change in the modules of a block after its functions were joined: the one place that looks."""

from itertools import chain, repeat
from operator import attrgetter, contains, is_

import torch
from torch import nn

from ...models.block import Block
from ...mpu.managed_parameter import SUM
from .joinable_layers import JoinableLayers

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
HOOKS_OF_ALL = [getattr(nn.modules.module, f"_global{name}") for name in HOOKS]
_REQUIRES_GRAD = attrgetter("requires_grad")
# Second arguments of `map`.
_SUM = repeat(SUM)
_FORWARD = repeat("forward")


class BlockWatch:
    """A block, and its layers if they are joined, as they are when it is made.

    Every forward asks it, so its questions are calls of `map` over dicts of the modules.
    """

    def __init__(self, block: Block, layers: JoinableLayers | None):
        modules = [] if layers is None else layers.modules
        self._parameters = [] if layers is None else layers.parameters
        # Children and parameters of the modules, and what they are now.
        self._members: list[dict] = [block._modules]
        self._members += (m._modules for m in block.children())
        self._members += (m._parameters for m in modules)
        self._known = [*chain.from_iterable(map(dict.values, self._members))]
        self._of_mlp = vars(block.mlp)
        self._activation = self._of_mlp.get("activation")
        # Hooks; and attributes, of which a `forward` takes the place of that of the class.
        self._hooks = [getattr(m, name) for m in modules for name in HOOKS]
        self._hooks += HOOKS_OF_ALL
        self._attributes = [vars(m) for m in modules]

    def has_changed(self) -> bool:
        """Return whether a layer, a parameter or the activation was replaced."""
        if self._of_mlp.get("activation") is not self._activation:
            return True
        members = chain.from_iterable(map(dict.values, self._members))
        return not all(map(is_, members, self._known))

    def allows(self, x: torch.Tensor) -> bool:
        """Return whether functions without the calls of the layers compute what these compute for x: in training of
        parameters that ZeRO manages, none of them frozen, without autocast, hooks or a `forward` of an instance."""
        if not torch.is_grad_enabled() or any(self._hooks):
            return False
        if any(map(contains, self._attributes, _FORWARD)):
            return False
        if torch.is_autocast_enabled(x.device.type):
            return False
        is_managed = None not in map(getattr, self._parameters, _SUM, repeat(None))
        return is_managed and all(map(_REQUIRES_GRAD, self._parameters))
