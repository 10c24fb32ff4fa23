"""Loss terms that balance the load of experts, and statistics of the load.

    load balancing    E / (k T²) Σ_e P_e F_e          P_e sum of the scores of e, differentiable
                                                      F_e slots of e, before drops
    z-loss            mean over tokens of logsumexp(z)²

At an even load the load balancing loss is 1. The T tokens are those of a micro-batch or of each sequence,
whose mean is taken. With --calculate-per-token-loss each sequence weighs as many tokens as it has in the
loss, so that no division of a step into micro-batches changes the result. Padding does not count. Fedus et
al. 2021 (arXiv:2101.03961), section 2.2; per sequence:
DeepSeek-AI 2024 (arXiv:2412.19437), equations 17 to 20; z-loss: Zoph et al. 2022 (arXiv:2202.08906), section
3.

All follow from the `Totals` of a layer; nothing here communicates.
"""

from collections.abc import Callable

import torch

from ..batch.ledger import Ledger
from ..config.options.model import ModelConfig
from .totals import Totals

AUX = "load balancing loss"
Z_LOSS = "router z-loss"


def sets_of(config: ModelConfig, samples: int, ledger: Ledger) -> int:
    """Sets of tokens whose totals the losses need: the sequences of the micro-batch, or 1, all together."""
    kinds = {kind for kind, _ in _weighted(config)}
    if ledger.tokens is not None and (
        config.moe_z_loss_coeff or "global_aux_loss" in kinds
    ):
        return samples
    return samples if "seq_aux_loss" in kinds else 1


def add_losses(
    ledger: Ledger,
    totals: Totals,
    config: ModelConfig,
    last_share: torch.Tensor | None = None,
) -> None:
    """Add the terms that the configuration has weights for.

    totals      over the sets of `sets_of`, with squares for a z-loss
    last_share  [E], share of each expert in the slots of the previous step, for "global_aux_loss"
    """
    tokens = ledger.tokens
    for kind, weight in _weighted(config):
        name = AUX if kind == "aux_loss" else f"{kind.split('_')[0]} {AUX}"
        by_sequence = tokens if kind in BY_SEQUENCE else None
        count = 1 if by_sequence is None else by_sequence.sum()
        ledger.add(
            name, SCOPES[kind](totals, last_share, by_sequence), count, weight=weight
        )
    if config.moe_z_loss_coeff:
        value = totals.whole.sum_of("squares")
        count = totals.whole.sum_of("tokens")
        if tokens is not None:
            means = totals.sum_of("squares") / totals.sum_of("tokens").clamp(min=1)
            value = (means * tokens).sum()
            count = tokens.sum()
        ledger.add(Z_LOSS, value, count, weight=config.moe_z_loss_coeff)


# In these functions, tokens [sets] are those of `Ledger`: if given, the result is the sum over sets of their
# losses times their tokens.
def of_micro_batch(
    totals: Totals,
    last_share: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the load balancing loss over all tokens of the micro-batch; a scalar."""
    return _balance(totals.whole)


def of_sequences(
    totals: Totals,
    last_share: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mean over the sets of the load balancing loss of each; a scalar."""
    values = _balance(totals)
    return values.mean() if tokens is None else (values * tokens).sum()


def of_last_step(
    totals: Totals,
    last_share: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of the micro-batch against the shares of slots in the whole previous step; a scalar.

    Those shares are known before the step, so the term does not depend on how the step is divided.
    """
    assert last_share is not None, "the router's balance keeps it for this loss"
    of = totals.whole if tokens is None else totals
    num_experts = totals.num_experts
    # Before the first step there are no shares.
    share = last_share.where(last_share.sum() > 0, 1 / num_experts)
    values = (
        num_experts * (of.scores * share).sum(-1) / of.sum_of("tokens").clamp(min=1)
    )
    return values if tokens is None else (values * tokens).sum()


Scope = Callable[[Totals, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
SCOPES: dict[str, Scope] = {
    "aux_loss": of_micro_batch,
    "seq_aux_loss": of_sequences,
    "global_aux_loss": of_last_step,
}
# Losses whose sums over sequences make up that of a step.
BY_SEQUENCE = {
    "seq_aux_loss",
    "global_aux_loss",
}


def _weighted(config: ModelConfig) -> list[tuple[str, float]]:
    """Return the load balancing losses in use, and their weights."""
    both = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
    return [(kind, weight) for kind, weight in both if weight and kind in SCOPES]


def _balance(totals: Totals) -> torch.Tensor:
    """[sets]: E / (k T²) Σ P F of each."""
    total = (totals.scores * totals.demand).sum(-1)
    return (
        total
        * (totals.num_experts / totals.topk)
        / totals.sum_of("tokens").square().clamp(min=1)
    )


def record_load(
    ledger: Ledger,
    layer: str,
    totals: Totals,
    limited: bool,
    bias: torch.Tensor | None = None,
) -> None:
    """Metrics of a layer: largest demand for an expert relative to the mean, entropy of the router, the range
    of the experts' bias [E] if there is one; with `limited` experts the share of dropped slots, and where
    tokens may have no expert the share of those.
    """
    if bias is not None:
        ledger.record(f"{layer} bias range", bias.max() - bias.min())
    whole = totals.whole
    demand = whole.demand
    tokens = whole.sum_of("tokens")
    slots = demand.sum()
    ledger.record(
        f"{layer} max load", (demand.max() * len(demand) / slots.clamp(min=1)).float()
    )
    ledger.record(f"{layer} router entropy", whole.sum_of("entropy"), tokens)
    if limited:
        ledger.record(f"{layer} dropped", slots - whole.sum_of("kept"), slots)
    if "served" in whole.columns:
        ledger.record(
            f"{layer} without expert", tokens - whole.sum_of("served"), tokens
        )
