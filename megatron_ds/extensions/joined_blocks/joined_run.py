"""Blocks of a model that run as two functions and their attention, where these compute what the layers compute."""

import torch

from ...batch.batch import Batch
from ...models.block import Block, in_sequence
from ...ops.kernel_table import CHOICES
from .block_watch import BlockWatch
from .joinable_layers import joinable_layers
from .joined_block import JoinedBlock, after, before


class JoinedRun:
    """`Block.run` of one block. Its functions are joined again when the input has another shape or dtype, when other
    kernels are chosen, and when the program has changed the block."""

    def __init__(self) -> None:
        self._key: tuple | None = None
        self._watch: BlockWatch | None = None
        self._joined: JoinedBlock | None = None

    def __deepcopy__(self, memo: dict) -> "JoinedRun":
        return JoinedRun()

    def __call__(self, block: Block, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        joined = self.functions(block, x)
        if joined is None:
            return in_sequence(block, x, batch)
        # No name holds what attention has read: it is freed before the second half.
        attended = joined.attention.attend(before(x, joined), batch)
        return after(attended, x, joined)

    def functions(
        self,
        block: Block,
        x: torch.Tensor,
    ) -> JoinedBlock | None:
        """Return the joined functions of the block for x; None where its layers run one by one."""
        # A plan computes on tensors without memory, layer by layer.
        is_planned = type(x) is not torch.Tensor or x.is_meta
        if torch.compiler.is_dynamo_compiling() or is_planned:
            return None
        drops = block.attention_dropout.p or block.mlp_dropout.p
        if drops or not x.requires_grad:
            return None
        # In most calls all of this is as in the last call.
        key = x.shape, x.dtype, CHOICES.number
        watch = self._watch
        is_known = key == self._key and key[2] is not None
        if watch is None or not is_known or watch.has_changed():
            watch = self._join(block, x)
            self._key = key
        return self._joined if watch.allows(x) else None

    def _join(self, block: Block, x: torch.Tensor) -> BlockWatch:
        layers = joinable_layers(block)
        self._joined = None
        if layers is not None:
            self._joined = layers.joined(x)
        self._watch = BlockWatch(block, layers)
        return self._watch
