"""Loss terms that balance the load of experts, and statistics of the load.

    load balancing    E / (k T²) Σ_e P_e F_e          P_e sum of the scores of e, differentiable
                                                      F_e slots of e, before drops
    z-loss            mean over tokens of logsumexp(z)²

At an even load the load balancing loss is 1. The T tokens are those of a micro-batch or of each sequence,
whose mean is taken. Padding does not count. Fedus et al. 2021 (arXiv:2101.03961), section 2.2; per sequence:
DeepSeek-AI 2024 (arXiv:2412.19437), equations 17 to 20; z-loss: Zoph et al. 2022 (arXiv:2202.08906), section
3.

With sequence parallelism a rank has some of the tokens: F is summed over the ranks as integers, and sums of
scores by an all-reduce whose gradient each rank receives for its own tokens.
"""

from collections.abc import Iterator

import torch

from ..config.model_options import ModelConfig
from ..data.ledger import Ledger
from ..mpu import collectives
from ..mpu.group import Group
from ..mpu.regions import reduce_from_region
from .router import Routing

AUX, Z_LOSS = "load balancing loss", "router z-loss"


def add_losses(ledger: Ledger, routing: Routing, samples: int, config: ModelConfig, group: Group | None,
               counted: torch.Tensor | None = None, last_share: torch.Tensor | None = None) -> None:
    """Add the terms that the configuration has weights for.

    samples    sequences of the micro-batch; tokens of the routing are [s, samples]
    group      ranks that divide the sequences; collective over it. None: this rank has them whole
    counted    bool [T], False for padding; None: all tokens
    last_share  [E], share of each expert in the slots of the previous step, for "global_aux_loss"
    """
    for kind, weight in zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff):
        if weight and kind in SCOPES:
            value = SCOPES[kind](routing, samples, group, counted, last_share)
            ledger.add(AUX if kind == "aux_loss" else f"{kind.split('_')[0]} {AUX}", value, weight=weight)
    if config.moe_z_loss_coeff:
        squares = routing.logits.logsumexp(-1).square()
        ledger.add(Z_LOSS, *_mean_parts(squares, counted, group), weight=config.moe_z_loss_coeff)


def of_micro_batch(routing: Routing, samples: int, group: Group | None, counted: torch.Tensor | None,
                   last_share: torch.Tensor | None = None) -> torch.Tensor:
    """The load balancing loss over all tokens of the micro-batch; a scalar."""
    return _balance(routing, 1, group, counted).squeeze(0)


def of_sequences(routing: Routing, samples: int, group: Group | None, counted: torch.Tensor | None,
                 last_share: torch.Tensor | None = None) -> torch.Tensor:
    """The mean over sequences of the load balancing loss of each; a scalar."""
    return _balance(routing, samples, group, counted).mean()


def of_last_step(routing: Routing, samples: int, group: Group | None, counted: torch.Tensor | None,
                 last_share: torch.Tensor | None = None) -> torch.Tensor:
    """Scores of the micro-batch against the shares of slots in the whole previous step; a scalar.

    Those shares are known before the step, so the term does not depend on how the step is divided.
    """
    num_experts = routing.scores.shape[1]
    scores, tokens = _sums(routing, 1, group, counted)
    share = last_share.where(last_share.sum() > 0, 1 / num_experts)                # before the first step
    return num_experts * (scores[0] * share).sum() / tokens[0].clamp(min=1)


SCOPES = {"aux_loss": of_micro_batch, "seq_aux_loss": of_sequences, "global_aux_loss": of_last_step}


def load_of(routing: Routing, groups: int, counted: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [groups, E]: slots of each expert before drops. Token t belongs to group t modulo `groups`."""
    num_experts, k = routing.scores.shape[1], routing.experts.shape[1]
    experts = routing.experts.view(-1, groups, k)
    ones = torch.ones_like(experts)
    if counted is not None:
        ones = ones * counted.view(-1, groups, 1)
    load = experts.new_zeros(groups, num_experts)
    return load.scatter_add_(1, experts.transpose(0, 1).reshape(groups, -1),
                             ones.transpose(0, 1).reshape(groups, -1))


def _balance(routing: Routing, groups: int, group: Group | None,
             counted: torch.Tensor | None) -> torch.Tensor:
    """[groups]: E / (k T²) Σ P F of each."""
    num_experts, k = routing.scores.shape[1], routing.experts.shape[1]
    load = load_of(routing, groups, counted)
    if group is not None:
        collectives.all_reduce_(load, group)
    scores, tokens = _sums(routing, groups, group, counted)
    return num_experts * (scores * load).sum(1) / (k * tokens.square().clamp(min=1))


def _sums(routing: Routing, groups: int, group: Group | None,
          counted: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums of scores [groups, E], numbers of tokens [groups]) over all ranks of the group."""
    scores = routing.scores if counted is None else routing.scores * counted[:, None]
    scores = scores.view(-1, groups, scores.shape[1])
    tokens = scores.new_full((groups,), scores.shape[0]) if counted is None else (
        counted.view(-1, groups).sum(0).to(scores.dtype))
    total = torch.cat((scores.sum(0), tokens[:, None]), 1)
    if group is not None:
        total = reduce_from_region(total, group)
    return total[:, :-1], total[:, -1].detach()


def _mean_parts(values: torch.Tensor, counted: torch.Tensor | None,
                group: Group | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, count) of values [T] over all ranks of the group."""
    if counted is not None:
        values = values * counted
    count = values.new_tensor(float(len(values))) if counted is None else counted.sum().to(values.dtype)
    total = torch.stack((values.sum(), count))
    if group is not None:
        total = reduce_from_region(total, group)
    return total[0], total[1].detach()


def record_load(ledger: Ledger, layer: str, load: torch.Tensor, routing: Routing, group: Group | None,
                counted: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> None:
    """Metrics of a layer: largest load of an expert relative to the mean, entropy of the router, the range of
    the experts' bias [E] if there is one, and where slots may drop the share of dropped slots and of tokens
    without any expert. Padding does not count.

    load: int64 [E], kept slots over all ranks of the group. Collective over the group.
    """
    if bias is not None:
        ledger.record(f"{layer} bias range", bias.max() - bias.min())
    mean = load.sum().clamp(min=1) / len(load)
    ledger.record(f"{layer} max load", (load.max() / mean).float())
    parts = torch.stack([part.double() for part in _statistics(routing, counted)])
    if group is not None:
        collectives.all_reduce_(parts, group)
    entropy, tokens, slots, kept, served = parts.float()
    ledger.record(f"{layer} router entropy", entropy, tokens)
    if routing.kept is not None:
        if routing.planned is None:                                   # an expert that chooses drops nothing
            ledger.record(f"{layer} dropped", slots - kept, slots)
        ledger.record(f"{layer} without expert", tokens - served, tokens)


def _statistics(routing: Routing, counted: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Sums over tokens: entropy of the scores, tokens, slots, kept slots, tokens with an expert."""
    of_tokens = -torch.special.xlogy(routing.scores, routing.scores).detach().sum(1)
    here = torch.ones_like(of_tokens, dtype=torch.bool) if counted is None else counted
    kept = here[:, None].expand_as(routing.experts)
    if routing.kept is not None:
        kept = kept & routing.kept
    yield (of_tokens * here).sum()
    yield here.sum()
    yield here.sum() * routing.experts.shape[1]
    yield kept.sum()
    yield kept.any(1).sum()
