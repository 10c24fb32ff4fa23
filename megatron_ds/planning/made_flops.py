"""`MadeFlops`: FLOPs of a layer in which each context-parallel rank makes keys and values of the tokens of all ranks.

    F = `made` of the whole sequence, c ranks      the model     this layer, all ranks
    forward                                        F             c F
    backward: made once more                                     c F
    backward: gradients of the input, the weight   2 F           2 c F; of a frozen weight F and c F
    a forward that is recomputed                                 c F, in the core and in the whole block

`again` has one of the products that backward makes once more.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from ..models.layer import LayerFlops

Flops = Callable[[int, int], LayerFlops]


@dataclass(frozen=True)
class MadeFlops(LayerFlops):
    """FLOPs of all ranks. made: F, a part of the products with weights. makers: c"""

    made: float = 0.0
    makers: int = 1

    def beside(self, is_recomputed: bool) -> float:
        """Return the FLOPs of a sequence beside `total` and `again`, on all ranks together.

        is_recomputed: whether the core or the block is, of which `again` has no product then
        """
        halves = 1 if self.frozen else 2
        of_others = (2 + halves) * self.made * (self.makers - 1)
        return of_others + self.made * self.makers * is_recomputed


def beside_model(flops: LayerFlops, is_recomputed: bool) -> float:
    """Return `MadeFlops.beside` of a layer, 0 of any other."""
    return flops.beside(is_recomputed) if isinstance(flops, MadeFlops) else 0.0


def with_made(
    flops: Flops, weights: int, makers: int, seq_length: int, vocab_size: int
) -> MadeFlops:
    """Return the FLOPs of a layer. weights: elements of the weight that makes keys and values. makers: ranks"""
    found = flops(seq_length, vocab_size)
    made = 2.0 * seq_length * weights
    values = {field.name: getattr(found, field.name) for field in fields(LayerFlops)}
    values["again"] += made
    return MadeFlops(**values, made=made, makers=makers)
