"""Upcycling: the weights of a model with experts, made of those of a dense one (Komatsuzaki et al. 2022,
arXiv:2212.05055).

    dense                                     with E experts; G is the granularity
    …mlp.linear_fc1.weight  [(2) f, h]   →    …mlp.experts.linear_fc1.weight  [E, (2) f/G, h]
    …mlp.linear_fc2.weight  [h, f]       →    …mlp.experts.linear_fc2.weight  [E, h, f/G]   · G/w
    …mlp.linear_fc2.bias    [h]          →    …mlp.experts.linear_fc2.bias    [E, h]        · 1/w
                                              …mlp.router.weight  [E, h]: E/G new rows, each G times
    all other tensors                    →    the same

Expert e is part e % G of the dense feed-forward's width. The G parts of a *virtual group*, experts iG to
iG + G − 1, have the same router row, so a token that chooses one of them chooses all, and k is a multiple of
G (He et al. 2024, arXiv:2410.07524, section 3). w is the sum of a token's k routing weights if all experts
score the same: 1 for softmax over the chosen experts and for normalized sigmoids, k/E for softmax over all.
So the experts add up to the dense feed-forward,

    Σ_chosen weight_e · expert_e(x) = (sum of the weights / w) · feed_forward(x),

for any router if the sum of the weights does not depend on the scores (`is_exact`), and else if they are
equal. The factor is in fc2 alone, since the activation is not linear.

Nothing is kept in memory: each tensor of the result is made when it is written.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from ...checkpoint.pieces import MadePiece
from ...checkpoint.whole_tensors import StoredTensors
from ...config.options.model import ModelConfig
from ...errors import CheckpointError, ConfigError
from ...models.specs import specs_of
from ...mpu.param_spec import ParamSpec
from ...tensor_parallel.init import initialize_interval

FEED_FORWARD = ".mlp."
# Routers whose weights do not follow from scores alone.
CHOOSING_OTHERWISE = (
    "sinkhorn",
    "expert_choice",
)


@dataclass(frozen=True)
class Upcycling:
    """model: with experts. seed: of the router's rows. granularity: parts of the dense width, G above."""

    model: ModelConfig
    seed: int
    granularity: int = 1

    def check(self) -> None:
        """Raises ConfigError for sizes that do not divide, and for parts without a dense counterpart.

        The model itself is checked by the rules of its configuration.
        """
        model = self.model
        parts = self.granularity
        numbers = sorted({number for number in model.experts if number})
        if not numbers:
            raise ConfigError(
                "the new model has no layer with experts. Give --num-experts, and with it "
                "--moe-layer-freq if not all layers are to have experts."
            )
        # Each expert is divided into equal parts, which are chosen together.
        named = {
            "--ffn-hidden-size": [model.ffn_size],
            "--moe-router-topk": [model.moe_router_topk],
            "--num-experts": numbers,
        }
        for name, values in named.items():
            if odd := [value for value in values if parts < 1 or value % parts]:
                raise ConfigError(
                    f"--moe-upcycling-granularity {parts} does not divide {name} {odd[0]}: the "
                    f"{parts} experts that hold the parts of a feed-forward are chosen "
                    "together. Use a number that divides width, experts and k."
                )
        if model.expert_ffn_size != model.ffn_size // parts:
            raise ConfigError(
                f"--moe-ffn-hidden-size {model.expert_ffn_size}: an expert is one of {parts} "
                f"part(s) of a feed-forward of width {model.ffn_size}. Omit the flag, or "
                "choose the width by --moe-upcycling-granularity."
            )
        # Parts of the new model for which the dense one has no weights, or other scores.
        if model.moe_shared_expert_intermediate_size:
            raise ConfigError(
                "--moe-shared-expert-intermediate-size: a dense checkpoint has no weights for "
                "shared experts, and new ones would change the loss. Omit it, or use "
                "--mlp-type residual, whose dense part is the feed-forward."
            )
        if others := [
            kind
            for kind in model.moe_router_load_balancing_type
            if kind in CHOOSING_OTHERWISE
        ]:
            raise ConfigError(
                f"--moe-router-load-balancing-type {others[0]}: a token's weights do not follow "
                "from its scores, so no factor keeps the loss. Upcycle with aux_loss, and "
                "change it in training."
            )

    def pieces(self, dense: StoredTensors) -> list[MadePiece]:
        """All weights of the model as pieces. Raises CheckpointError unless `dense` has what they need, and
        nothing else.
        """
        entries = {
            entry.name: replace(entry, dtype=torch.float32) for entry in dense.entries
        }
        # All experts of a layer read the same tensor.
        read = lru_cache(maxsize=1)(lambda name: dense.read(entries[name]))
        plans = [(spec, *self._made_of(spec)) for spec in specs_of(self.model)]
        used = {name for _, name, _ in plans if name}
        if differing := sorted(used ^ entries.keys()):
            raise CheckpointError(
                f"the checkpoint and a dense model of these sizes differ in {differing[0]} "
                f"and {len(differing) - 1} other tensors: it is damaged, or another "
                "program wrote it."
            )
        pieces = []
        for spec, name, make in plans:
            pieces += make(spec, partial(read, name))
        return pieces

    def _made_of(self, spec: ParamSpec) -> tuple[str | None, Callable]:
        """(name of the dense tensor or None, function from the spec and a reader to pieces)."""
        layer, _, leaf = spec.name.partition(FEED_FORWARD)
        if leaf.startswith("experts."):
            leaf = leaf.removeprefix("experts.")
            make = partial(_experts, self.granularity, self._factor(spec, leaf))
            return f"{layer}{FEED_FORWARD}{leaf}", make
        if leaf.startswith("mlp."):
            return f"{layer}{FEED_FORWARD}{leaf.removeprefix('mlp.')}", _copied
        if leaf == "router.weight":
            return None, partial(_drawn, self.seed, self.granularity)
        if leaf == "coefficient" or leaf.startswith("router."):
            return None, partial(_drawn, self.seed, 1)
        return spec.name, _copied

    def _factor(self, spec: ParamSpec, leaf: str) -> float:
        weight = equal_scores_weight(self.model, spec.shape[0])
        return {
            "linear_fc2.weight": self.granularity / weight,
            "linear_fc2.bias": 1 / weight,
        }.get(leaf, 1.0)


def equal_scores_weight(model: ModelConfig, num_experts: int) -> float:
    """Return the sum of the routing weights of a token whose scores of all experts are equal."""
    k = model.moe_router_topk
    if model.moe_router_score_function == "sigmoid":
        weight = 1.0 if k > 1 else 0.5
    else:
        weight = k / num_experts if model.moe_router_pre_softmax else 1.0
    return weight * (model.moe_router_topk_scaling_factor or 1.0)


def is_exact(model: ModelConfig, granularity: int) -> bool:
    """Return whether the upcycled model computes what the dense one does, for any weights of the router.

    It does if the weights of a token sum to a constant, no token is dropped, and neither noise nor the router's
    groups of experts divide a virtual group.
    """
    is_constant = (
        model.moe_router_topk > 1
        if model.moe_router_score_function == "sigmoid"
        else not model.moe_router_pre_softmax
    )
    is_dropless = (
        model.moe_expert_capacity_factor is None
        and model.moe_eval_capacity_factor is None
    )
    groups = model.moe_router_num_groups or 1
    is_together = model.moe_router_noise != "gumbel" and all(
        number // groups % granularity == 0 for number in model.experts
    )
    return is_constant and is_dropless and (granularity == 1 or is_together)


# ---- Functions from a spec, and a reader of the dense tensor, to pieces.


def _copied(spec: ParamSpec, read: Callable[[], torch.Tensor]) -> list[MadePiece]:
    return [_piece(spec, spec.shape, read)]


def _drawn(seed: int, copies: int, spec: ParamSpec, _: Callable) -> list[MadePiece]:
    """Return a piece drawn as `tensor_parallel.init` draws it, with each row repeated `copies` times."""
    distinct = replace(spec, shape=(spec.shape[0] // copies, *spec.shape[1:]))

    def make() -> torch.Tensor:
        rows = torch.empty(distinct.numel)
        initialize_interval(rows, distinct, 0, seed, {})
        return rows.view(distinct.shape).repeat_interleave(copies, 0)

    return [_piece(spec, spec.shape, make)]


def _experts(
    parts: int, factor: float, spec: ParamSpec, read: Callable[[], torch.Tensor]
) -> list[MadePiece]:
    """One piece for each expert. The width is the dimension that tensor parallelism splits."""
    split = spec.tensor_split

    def make(expert: int) -> torch.Tensor:
        values = read()
        if split is not None:
            width = split.dim - 1  # the sizes of a single expert
            cut = values.unflatten(
                width, (split.parts, parts, -1)
            )  # [.., 2 of [gate; up], G, f/G, ..]
            values = cut.select(width + 1, expert % parts).flatten(width, width + 1)
        return (values if factor == 1 else values * factor)[None]

    return [
        _piece(spec, spec.shape[1:], partial(make, expert), expert)
        for expert in range(spec.shape[0])
    ]


def _piece(
    spec: ParamSpec,
    shape: Sequence[int],
    make: Callable[[], torch.Tensor],
    index: int = 0,
) -> MadePiece:
    """Return the `index`-th piece of this shape. Without splits it is one rectangle."""
    blank = torch.empty(torch.Size(shape).numel(), device="meta")
    return MadePiece(replace(spec, splits=()), blank, make, index * blank.numel())


def counted(
    pieces: Sequence[MadePiece], done: Callable[[int], object]
) -> Iterator[MadePiece]:
    """Yield the pieces, and call done(bytes) when one is made."""

    def make(piece: MadePiece) -> torch.Tensor:
        done(piece.tensor.nbytes)
        return piece.make()

    return (replace(piece, make=partial(make, piece)) for piece in pieces)
