"""A mixture of experts as the papers write it: one token after another, whole tensors, no parallelism. What
ours is compared with.

Weights are a dictionary of logical tensors {name: tensor}, as of `plain_gpt`, whose `feed_forward` this is.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch

from .plain_gpt import logical_shapes, plain_mlp


def moe_shapes(config, shapes=None, prefix="decoder") -> dict[str, tuple[int, ...]]:
    """Names and true shapes of every parameter; `shapes` are those of the model without experts."""
    shapes = dict(logical_shapes(config) if shapes is None else shapes)
    h, f, gated = (
        config.hidden_size,
        config.expert_ffn_size,
        2 if config.is_gated else 1,
    )
    for i, experts in enumerate(config.experts):
        if not experts:
            continue
        name = f"{prefix}.layers.{i}.mlp"
        dense = {
            key: shapes.pop(key) for key in list(shapes) if key.startswith(f"{name}.")
        }
        shapes[f"{name}.router.weight"] = (experts, h)
        for linear, out, into in (("linear_fc1", gated * f, h), ("linear_fc2", h, f)):
            shapes[f"{name}.experts.{linear}.weight"] = (experts, out, into)
            if config.add_bias_linear:
                shapes[f"{name}.experts.{linear}.bias"] = (experts, out)
        if config.mlp_type == "residual":
            shapes |= {
                key.replace(".mlp.", ".mlp.mlp."): shape for key, shape in dense.items()
            }
            shapes[f"{name}.coefficient"] = (2, h)
        elif config.moe_shared_expert_intermediate_size:
            wide = config.moe_shared_expert_intermediate_size
            for linear, out, into in (
                ("linear_fc1", gated * wide, h),
                ("linear_fc2", h, wide),
            ):
                shapes[f"{name}.shared_experts.{linear}.weight"] = (out, into)
                if config.add_bias_linear:
                    shapes[f"{name}.shared_experts.{linear}.bias"] = (out,)
            if config.moe_shared_expert_gate:
                shapes[f"{name}.shared_experts.gate_weight"] = (1, h)
    return shapes


def moe_weights(config, seed: int, shapes=None) -> dict[str, torch.Tensor]:
    """Weights large enough that every term matters. float64."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        / math.sqrt(shape[-1])
    )
    return {
        name: draw(shape) * 1.5 + (0.7 if "norm.weight" in name else 0.0)
        for name, shape in (moe_shapes(config) if shapes is None else shapes).items()
    }


@dataclass
class PlainMoE:
    """Layers with experts of one forward. padding: bool [b, s], True where there is no token.

    Afterwards: `objective`, the weighted sum of all loss terms; layer name → slots of each expert that tokens
    chose (`demand`) and that were computed (`load`); `margin`, the least difference that decided a choice
    among experts.
    """

    padding: torch.Tensor | None = None
    training: bool = True
    objective: torch.Tensor | float = 0.0
    demand: dict = field(default_factory=dict)
    load: dict = field(default_factory=dict)
    margin: float = math.inf

    def __call__(self, w, name, x, config):
        """x [b, s, h] → the same shape."""
        if f"{name}.router.weight" not in w:
            return plain_mlp(w, name, x, config)
        b, s, h = x.shape
        logits = x @ w[f"{name}.router.weight"].T
        is_sigmoid = config.moe_router_score_function == "sigmoid"
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        real = [
            (i, t)
            for i in range(b)
            for t in range(s)
            if self.padding is None or not self.padding[i, t]
        ]
        if "expert_choice" in config.moe_router_load_balancing_type:
            chosen = self._tokens_of_experts(scores, real, config)
            weights = {
                (i, t, e): scores[i, t, e] for i, t in real for e in chosen[i, t]
            }
        else:
            chosen = {
                place: self._choose(logits[place], scores[place], config)
                for place in real
            }
            weights = {
                (*place, e): weight
                for place in real
                for e, weight in zip(
                    chosen[place],
                    _weights(logits[place], scores[place], chosen[place], config),
                )
            }
        if self.training:
            self._add_losses(logits, scores, chosen, real, config)
        kept = self._kept(chosen, weights, scores.shape[2], b, s, config)
        y = torch.zeros_like(x)
        self.demand[name], self.load[name] = ([0] * scores.shape[2] for _ in range(2))
        for (i, t), experts in chosen.items():
            for e in experts:
                self.demand[name][e] += 1
                if (i, t, e) in kept:
                    self.load[name][e] += 1
                    factor = config.moe_router_topk_scaling_factor or 1.0
                    out = (
                        weights[i, t, e]
                        * factor
                        * plain_expert(w, f"{name}.experts", e, x[i, t], config)
                    )
                    y = y.index_put(
                        (torch.tensor(i), torch.tensor(t)), out, accumulate=True
                    )
        return self._joined(w, name, x, y, config)

    def _choose(self, logits, scores, config) -> list[int]:
        """The best experts of one token, descending."""
        k, before = config.moe_router_topk, config.moe_router_pre_softmax
        rank = (
            scores
            if before or config.moe_router_score_function == "sigmoid"
            else logits
        ).tolist()
        allowed = list(range(len(rank)))
        if config.moe_router_num_groups:
            each, best = (
                len(rank) // config.moe_router_num_groups,
                k // config.moe_router_group_topk,
            )
            groups = [list(range(g, g + each)) for g in range(0, len(rank), each)]
            total = lambda group: sum(
                sorted((rank[e] for e in group), reverse=True)[:best]
            )
            groups.sort(key=total, reverse=True)
            if config.moe_router_group_topk < len(groups):
                self.margin = min(
                    self.margin,
                    total(groups[config.moe_router_group_topk - 1])
                    - total(groups[config.moe_router_group_topk]),
                )
            allowed = sorted(sum(groups[: config.moe_router_group_topk], []))
        order = sorted(allowed, key=lambda e: -rank[e])
        if k < len(order):
            self.margin = min(self.margin, rank[order[k - 1]] - rank[order[k]])
        return order[:k]

    def _tokens_of_experts(self, scores, real, config):
        chosen = {place: [] for place in real}
        experts = scores.shape[2]
        for i in {i for i, _ in real}:
            tokens = [t for j, t in real if j == i]
            capacity = -(-config.moe_router_topk * len(tokens) // experts)
            for e in range(experts):
                order = sorted(tokens, key=lambda t, i=i, e=e: -scores[i, t, e].item())
                for t in order[:capacity]:
                    chosen[i, t].append(e)
                if capacity < len(order):
                    self.margin = min(
                        self.margin,
                        (
                            scores[i, order[capacity - 1], e]
                            - scores[i, order[capacity], e]
                        ).item(),
                    )
        return chosen

    def _kept(self, chosen, weights, experts, b, s, config):
        factor = (
            config.moe_expert_capacity_factor
            if self.training
            else config.moe_eval_capacity_factor
        )
        slots = [
            (i, t, j, e)
            for (i, t), of_token in chosen.items()
            for j, e in enumerate(of_token)
        ]
        if factor is None:
            return {(i, t, e) for i, t, _, e in slots}
        whole = config.moe_capacity_scope == "micro-batch"
        tokens = Counter(0 if whole else i for i, _ in chosen)  # real ones, of each set
        share = {
            one: factor * config.moe_router_topk * count / experts
            for one, count in tokens.items()
        }
        capacity = {
            one: max(config.moe_min_capacity, math.ceil(x)) for one, x in share.items()
        }
        slots.sort(key=lambda slot: (slot[1], slot[0], slot[2]))
        if config.moe_token_drop_policy == "probs":
            slots.sort(key=lambda slot: -weights[slot[0], slot[1], slot[3]].item())
        taken, kept = defaultdict(int), set()
        for i, t, _, e in slots:
            key = e if whole else (i, e)
            if taken[key] < capacity[0 if whole else i]:
                taken[key] += 1
                kept.add((i, t, e))
        return kept

    def _add_losses(self, logits, scores, chosen, real, config) -> None:
        b, experts, k = scores.shape[0], scores.shape[2], config.moe_router_topk
        shares = scores / scores.sum(-1, keepdim=True)

        def balance(places):
            if not places:
                return 0.0
            p = sum(shares[place] for place in places) / len(places)
            f = torch.tensor(
                [sum(e in chosen[place] for place in places) for e in range(experts)]
            )
            return experts * (p * f / (k * len(places))).sum()

        values = {
            "aux_loss": lambda: balance(real),
            "seq_aux_loss": lambda: (
                sum(balance([q for q in real if q[0] == i]) for i in range(b)) / b
            ),
        }
        for kind, coefficient in zip(
            config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
        ):
            if coefficient:
                self.objective = self.objective + coefficient * values[kind]()
        if config.moe_z_loss_coeff:
            z = sum(logits[place].exp().sum().log() ** 2 for place in real) / len(real)
            self.objective = self.objective + config.moe_z_loss_coeff * z

    def _joined(self, w, name, x, y, config):
        if config.mlp_type == "residual":
            share = (x @ w[f"{name}.coefficient"].T).softmax(-1)
            return share[..., :1] * y + share[..., 1:] * plain_mlp(
                w, f"{name}.mlp", x, config
            )
        if config.moe_shared_expert_intermediate_size:
            shared = plain_mlp(w, f"{name}.shared_experts", x, config)
            if config.moe_shared_expert_gate:
                shared = (
                    shared * (x @ w[f"{name}.shared_experts.gate_weight"].T).sigmoid()
                )
            return y + shared
        return y


def _weights(logits, scores, chosen, config):
    if config.moe_router_score_function == "sigmoid":
        total = sum(scores[e] for e in chosen) if len(chosen) > 1 else 1.0
        return [scores[e] / total for e in chosen]
    if config.moe_router_pre_softmax:
        return [scores[e] for e in chosen]
    return [logits[e].exp() / sum(logits[o].exp() for o in chosen) for e in chosen]


def plain_expert(w, name, e, x, config):
    """Expert number e of one token [h]."""
    part = {
        f"expert.{key}": w[f"{name}.{key}"][e]
        for key in (
            "linear_fc1.weight",
            "linear_fc1.bias",
            "linear_fc2.weight",
            "linear_fc2.bias",
        )
        if f"{name}.{key}" in w
    }
    return plain_mlp(part, "expert", x, config)
