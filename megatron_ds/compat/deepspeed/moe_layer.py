"""`MoE`: DeepSpeed's layer of that name, whose experts are copies of any torch module.

    x [.., h] ── gate ── dispatch ── experts (copies of the module) ── combine ──┬── output [.., h]
              └─ the module itself, use_residual ────────────────────────────────┘  c0 routed + c1 dense

    engine, *_ = megatron_ds.initialize(model=model, config=config)    # the ranks of ep_size are taken there

Gate and loss term are in gates.py, with their formulas; the movement of tokens is `Dispatch`. Parameters have
the names that they have in DeepSpeed, and experts are saved under their numbers among all experts, so a
checkpoint of an engine loads at any ep_size. Each expert's gradient is summed over the ranks that hold it, at
every ZeRO stage.

What differs from DeepSpeed:

    input of an expert   [n, h], its own n tokens, n may be 0; there [ep, 1, C, h] with rows of zeros
    capacity             drops the same tokens, except for k = 1 without random selection: here the first
                         tokens of an expert stay, there any
    noise                functions of seed, layer, micro-batch and the token's place in the call; there of a
                         random state
    used_token           for all k; there for k = 1
    weights              applied in fp32 to 16-bit results of experts
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import ConfigError
from ...moe.dispatch import Dispatch, Groups
from ...mpu.grid import divisors
from ...mpu.group import Group, solo
from .gates import Draws, GateOptions, TopKGate

NOISES = (None, "None", "Jitter", "RSample")


def first_micro_batch() -> int:
    """0, without an engine that counts."""
    return 0


@dataclass(frozen=True)
class RoutingPlace:
    """Where a layer computes, and when: `initialize` gives it. Copies of the layer share it.

    ep           the ranks that divide the experts
    key          seed and name of the layer, for random numbers
    micro_batch  () → number of the present micro-batch among those of all ranks and steps
    tp_size      ranks that hold the rest of tensor-parallel parameters
    """

    ep: Group
    key: tuple[int | str, ...] = (0, "")
    micro_batch: Callable[[], int] = first_micro_batch
    tp_size: int = 1

    def __deepcopy__(self, memo: dict) -> "RoutingPlace":
        return self


class MoE(nn.Module):
    """hidden_states [.., h] → (output [.., h], l_aux, exp_counts): a token passes k of num_experts experts.

    hidden_size          h
    expert               a module [n, h] → [n, h], or a tuple that begins with that. Each expert is a copy of
                         it, so all have the same initial values, as in DeepSpeed (on ranks with other seeds,
                         those of the first rank that holds the expert)
    num_experts          experts of the layer
    ep_size              ranks that divide them, among the data-parallel ones
    k                    experts of a token
    capacity_factor, eval_capacity_factor, min_capacity
                         places of an expert: max(min_capacity, ceil(factor k T / num_experts)) of the T
                         tokens of the rank's call, so what is dropped depends on the layout, as in DeepSpeed
    use_residual         add `expert` itself as a dense module, with trained shares of both (PR-MoE)
    noisy_gate_policy    in training. "Jitter": the gate's input times 1 ± 0.01; "RSample": Gumbel noise on
                         logits, with k = 1 only, as in DeepSpeed
    drop_tokens          False: no limit of places
    use_rts              k = 1: random tokens keep the places of a full expert; False: the first
    use_tutel            no effect: it concerns DeepSpeed's implementation
    enable_expert_tensor_parallelism  refused with tensor-parallel ranks: every one of them computes whole
                         experts
    top2_2nd_expert_sampling  k = 2: Gumbel noise on the logits of the second choice

    Random numbers depend on the seed of `torch.manual_seed` on rank 0 when `initialize` is called, on the
    name of the layer, the micro-batch and the token's place in it: equal in a recomputed forward and after a
    resume. Without an engine every call has the same ones.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ):
        super().__init__()
        # Arguments that cannot be met.
        _check_sizes(num_experts, ep_size, k)
        if noisy_gate_policy not in NOISES:
            raise ConfigError(
                f"noisy_gate_policy={noisy_gate_policy!r} of an MoE layer is unknown. Use one "
                f"of {NOISES}."
            )
        _check_expert(expert)
        # Attributes that DeepSpeed's layer has.
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.use_residual = use_residual
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        # The gate, and this rank's copies of the expert.
        options = GateOptions(
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = _Routed(
            TopKGate(hidden_size, num_experts, options),
            _Copies(expert, self.num_local_experts, self.expert_group_name),
        )
        # The expert itself runs beside the routed ones.
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)
        self._place = RoutingPlace(solo("ep"))

    def connect(self, place: RoutingPlace) -> None:
        """Take the ranks and the random key. Raises ConfigError where they do not fit."""
        if self.enable_expert_tensor_parallelism and place.tp_size > 1:
            raise ConfigError(
                f"enable_expert_tensor_parallelism with {place.tp_size} tensor-parallel ranks "
                "is not supported: each of them computes whole experts. Leave it out, or use "
                "one tensor-parallel rank."
            )
        self._place = place

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(output, l_aux, exp_counts). Collective over the ranks that divide the experts.

        used_token  [.. of hidden_states], 0 or False for padding, whose output is 0 (with use_residual: the
                    dense part). None: no padding
        l_aux       fp32 scalar, to be added to the loss with a weight; 1 at an even load. Of this rank's call
        exp_counts  int64 [num_experts], choices of this rank's call before drops
        """
        place = self._place
        if place.ep.size != self.ep_size:
            raise ConfigError(
                f"an MoE layer with ep_size={self.ep_size} is called on {place.ep.size} rank: "
                f"it holds {self.num_local_experts} of {self.num_experts} experts. Give the "
                "model to megatron_ds.initialize first, or use ep_size=1."
            )
        draws = Draws((*place.key, place.micro_batch()))
        output, l_aux, exp_counts = self.deepspeed_moe(
            hidden_states, used_token, place.ep, draws
        )
        if self.use_residual:
            dense = _tensor_of(self.mlp(hidden_states))
            share = self.coefficient(hidden_states).softmax(-1)
            output = output * share[..., :1] + dense * share[..., 1:]
        return output, l_aux, exp_counts


class _Routed(nn.Module):
    """The part of the layer that has experts; DeepSpeed's names of parameters begin with it."""

    def __init__(self, gate: TopKGate, experts: "_Copies"):
        super().__init__()
        self.gate = gate
        self.experts = experts

    def forward(
        self, x: torch.Tensor, used_token: torch.Tensor | None, ep: Group, draws: Draws
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = x.reshape(-1, x.shape[-1])
        used = None if used_token is None else used_token.reshape(-1).bool()
        if used is not None and len(used) != len(tokens):
            raise ConfigError(
                f"used_token has {len(used)} elements, but hidden_states {list(x.shape)} holds "
                f"{len(tokens)} tokens. Give one for each token."
            )
        routing, l_aux, exp_counts = self.gate(tokens, used, draws)
        groups = Groups(ep, solo("tp"), sequence_parallel=False)
        dispatch = Dispatch(routing, len(exp_counts), groups)
        rows = dispatch.arrive(dispatch.send(tokens))
        return (
            dispatch.back(self.experts(rows, dispatch.runs.counts)).view_as(x),
            l_aux,
            exp_counts,
        )


class ExpertList(nn.ModuleList):
    """The experts of this rank: element i of n on part p of the experts has the number p n + i."""


class _Copies(nn.Module):
    """The experts of this rank, copies of one module."""

    def __init__(self, expert: nn.Module, count: int, group_name: str):
        super().__init__()
        self.deepspeed_experts = ExpertList(copy.deepcopy(expert) for _ in range(count))
        for each in self.deepspeed_experts:
            # A copied parameter has lost its attributes, such as marks of tensor parallelism.
            for p, original in zip(each.parameters(), expert.parameters(), strict=True):
                vars(p).update(vars(original), allreduce=False, group_name=group_name)

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        # Experts without rows are called too: at stage 3 all ranks must gather the same parameters.
        made = [
            _tensor_of(expert(x))
            for expert, x in zip(self.deepspeed_experts, rows.split(list(counts)))
        ]
        for x, count in zip(made, counts):
            if x.shape != (count, rows.shape[1]):
                raise ConfigError(
                    f"an expert of an MoE layer returned {list(x.shape)} for an input of "
                    f"{[count, rows.shape[1]]}, but results are added to the tokens' shape. "
                    "Give an expert whose output has the shape of its input."
                )
        return torch.cat(made)


def _tensor_of(output: torch.Tensor | tuple) -> torch.Tensor:
    """First element if the output is a tuple (DeepSpeed's rule), else the output."""
    return output[0] if isinstance(output, tuple) else output


def _check_sizes(num_experts: int, ep_size: int, k: int) -> None:
    if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
        legal = ", ".join(map(str, divisors(max(num_experts, 1))))
        raise ConfigError(
            f"an MoE layer has num_experts={num_experts} and ep_size={ep_size}: ep_size is the "
            "number of ranks that divide the experts, so it must divide their number. For "
            f"{max(num_experts, 1)} experts use ep_size {legal}."
        )
    if not 1 <= k <= num_experts:
        raise ConfigError(
            f"an MoE layer has k={k} experts for a token, of num_experts={num_experts}: the k "
            f"are different ones. Use k from 1 to {num_experts}."
        )


def _check_expert(expert: nn.Module) -> None:
    for name, p in expert.named_parameters():
        if hasattr(p, "spec"):
            raise ConfigError(
                f"parameter {name} of the expert has a spec, {p.spec.name}, which would be the "
                "name of every copy. Use an expert of torch layers."
            )
        if p.is_meta and hasattr(p, "partition"):
            raise ConfigError(
                f"parameter {name} of the expert was made under zero.Init, so this rank has a "
                "part of it and cannot copy it. Make models with MoE layers outside of "
                "zero.Init."
            )
