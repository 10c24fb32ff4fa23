"""`Balance`: what a router remembers from step to step: the bias of each expert, and the shares of the last
step.

Both follow from the demand for each expert in a step: the number of slots that tokens chose, before drops,
over all micro-batches and ranks. They are not trained by gradients and are part of every checkpoint, in fp32.

    bias     after a step  bias_e += rate · sign(mean demand − demand for e)   Wang et al. 2024
             so that overloaded experts are chosen less often                  (arXiv:2408.15664), algorithm 1
    share    demand for e / that for all experts, for the "global_aux_loss"

`StepState` gives one rank's routers their totals after each step, in one all-reduce. A module's state_dict
has the memories too, as ROUTER.expert_bias and ROUTER.last_share.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from ..batch.batch import Batch
from ..config.options.model import ModelConfig
from ..mpu import collectives
from ..mpu.group import Group
from ..mpu.param_spec import Init, ParamSpec
from ..mpu.parameter_piece import ParameterPiece


class Balance:
    """The memory of one router of E experts.

    bias   fp32 [E], None without expert bias
    share  fp32 [E], None unless a loss uses it
    tally  int64 [E], demand in the current step on this rank
    """

    def __init__(self, config: ModelConfig, num_experts: int, name: str):
        self.rate = config.moe_router_bias_update_rate
        self.num_experts = num_experts
        wanted = {
            "expert_bias": config.moe_router_enable_expert_bias,
            "last_share": "global_aux_loss" in config.moe_router_load_balancing_type,
        }
        self.specs = {
            leaf: ParamSpec(
                f"{name}.{leaf}", (num_experts,), Init("zeros"), decay=False
            )
            for leaf, is_wanted in wanted.items()
            if is_wanted
        }
        self.bias: torch.Tensor | None = None
        self.share: torch.Tensor | None = None
        self._tally: torch.Tensor | None = None

    @property
    def is_needed(self) -> bool:
        """Whether the router remembers anything."""
        return bool(self.specs)

    @property
    def is_placed(self) -> bool:
        """Whether the tensors are there."""
        return self._tally is not None

    @property
    def tally(self) -> torch.Tensor:
        """Return the demand of the step so far, int64 [E]."""
        assert self._tally is not None, "the tensors are placed first"
        return self._tally

    def place(self, device: torch.device) -> None:
        """Allocate on the device at first, later move there; nothing if the tensors are there already."""
        tally = self._tally
        if tally is None or tally.is_meta and device.type != "meta":
            zeros = lambda leaf: (
                torch.zeros(self.num_experts, device=device)
                if leaf in self.specs
                else None
            )
            self.bias = zeros("expert_bias")
            self.share = zeros("last_share")
            self._tally = torch.zeros(
                self.num_experts, dtype=torch.int64, device=device
            )
        elif tally.device != device:
            self.bias = None if self.bias is None else self.bias.to(device)
            self.share = None if self.share is None else self.share.to(device)
            self._tally = tally.to(device)

    def count(self, demand: torch.Tensor, batch: Batch) -> None:
        """Add the demand [E] of a micro-batch, whole numbers, in training only. A recomputed layer counts
        once.
        """
        if self.is_needed and batch.training and batch.ledger.is_open:
            self.tally.add_(demand.to(self.tally.dtype))

    def update(self, total: torch.Tensor) -> None:
        """After a step. total: int64 [E], demand over all ranks."""
        # Whole numbers are compared, so that equal choices give equal decisions, however ranks divide them.
        whole = total.sum()
        if self.bias is not None:
            self.bias += self.rate * (whole - total * self.num_experts).sign()
        if self.share is not None:
            self.share.copy_(total.double() / whole.clamp(min=1))

    def tensors(self) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Yield what a checkpoint holds."""
        values = {"expert_bias": self.bias, "last_share": self.share}
        for leaf, spec in self.specs.items():
            value = values[leaf]
            assert value is not None, "the tensors are placed first"
            yield spec, value


def balances_of(modules: Iterable[nn.Module]) -> list[Balance]:
    """Return the memories of all routers that need one, each once."""
    inner = chain.from_iterable(module.modules() for module in modules)
    found = (getattr(each, "balance", None) for each in inner)
    needed = (each for each in found if isinstance(each, Balance) and each.is_needed)
    return list(dict.fromkeys(needed))


class StepState:
    """The memories of all routers of a rank. group: ranks that see different tokens (`Mesh.reduction`)."""

    def __init__(
        self, modules: Iterable[nn.Module], group: Group, device: torch.device
    ):
        self.group = group
        self.balances = balances_of(modules)
        for balance in self.balances:
            balance.place(device)

    def after_step(self, applied: bool) -> None:
        """Update the memories, unless the step was skipped. Collective over the group."""
        if not self.balances:
            return
        totals = torch.cat([balance.tally for balance in self.balances])
        collectives.all_reduce_(totals, self.group)
        parts = totals.split([balance.num_experts for balance in self.balances])
        for balance, total in zip(self.balances, parts):
            balance.tally.zero_()
            if applied:
                balance.update(total)

    def forget(self) -> None:
        """Drop the slots of a step that is begun again."""
        for balance in self.balances:
            balance.tally.zero_()

    def pieces(self) -> list[ParameterPiece]:
        """For a checkpoint."""
        rank = self.group.rank
        size = self.group.size
        held = chain.from_iterable(balance.tensors() for balance in self.balances)
        return [
            ParameterPiece(spec, tensor, replica=rank, replicas=size)
            for spec, tensor in held
        ]


def show_in_state_dict(router: nn.Module) -> None:
    """Let the state_dict of a module with an attribute `balance` hold its memories, in fp32."""
    router.register_state_dict_post_hook(_add_memories)
    router.register_load_state_dict_pre_hook(_take_memories)


def _add_memories(router: nn.Module, state: dict, prefix: str, metadata: dict) -> None:
    state.update((prefix + leaf, tensor.detach()) for leaf, tensor in _placed(router))


def _take_memories(
    router: nn.Module,
    state: dict,
    prefix: str,
    metadata: dict,
    strict: bool,
    missing: list[str],
    *others: list[str],
) -> None:
    for leaf, tensor in _placed(router):
        if prefix + leaf in state:
            tensor.copy_(state.pop(prefix + leaf))
        elif strict:
            missing.append(prefix + leaf)


def _placed(router: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Memories by the last part of their names."""
    balance = router.balance
    weight = router.weight
    assert isinstance(balance, Balance) and isinstance(weight, torch.Tensor)
    if not balance.is_placed:
        balance.place(weight.device)
    return (
        (spec.name.rpartition(".")[2], tensor) for spec, tensor in balance.tensors()
    )
