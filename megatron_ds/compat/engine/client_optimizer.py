"""A torch optimizer of the user's, run on the shards of ZeRO.

The user's own instance keeps the parameter groups and does nothing else; its *twins*, optimizers of the same
class with the same attributes, update the pieces of parameters that a rank has. That is correct for every
elementwise optimizer. A trial on a small matrix finds out whether the optimizer is one:

    update of the matrix                          the reference
    update of the matrix, flat, in two parts      equal: the optimizer can be sharded
    the same, beginning with a state of zeros     equal: the state may exist before the first update;
                                                  otherwise `restart`

Refused are optimizers that need whole matrices (Muon, Adafactor, LAMB), and those that keep numbers for each
parameter besides its count of steps (NAdam's product of momenta), which a checkpoint for every layout cannot
hold.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError
from ...optim.part_optimizer import parameters_of
from ...zero.leaf_tensor import LeafTensor
from .optimizer import Group, InnerOptimizers

# of the trial
SHAPE = (3, 4)
CUT = 5
UPDATES = 3
ClientOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def client_optimizers(
    client: torch.optim.Optimizer, *, offloaded: bool
) -> InnerOptimizers:
    """Return the user's, as inner optimizers. Raises ConfigError if it cannot be sharded, or has made updates."""
    # Updates before sharding would be lost.
    name = type(client).__name__
    if any(float(state.get("step") or 0) for state in client.state.values()):
        raise ConfigError(
            f"the {name} given as optimizer= has made updates already, and its state would be "
            "lost. Give it to initialize before its first update; to continue a run, use "
            "engine.load_checkpoint."
        )
    # State that exists before the first step, as Adagrad's does.
    begun = {id(p): dict(state) for p, state in client.state.items()}
    client.state.clear()
    # A trial shows whether the optimizer can be sharded.
    needs_restart = _try(client, bool(begun)) or bool(begun)
    if needs_restart and offloaded:
        raise ConfigError(
            f"{name} begins with a state that is not zero, and offloaded state begins with "
            'zeros. Leave out "offload_optimizer", or use AdamW.'
        )

    # The optimizer of a rank's pieces, with the pieces of the state that the client began with.
    def make(groups: list[Group]) -> torch.optim.Optimizer:
        parameters: dict[str, nn.Parameter] = {}
        for group in client.param_groups:
            parameters |= {p.spec.name: p for p in group["params"]}
        initial: dict[torch.Tensor, dict] = {}
        if begun:
            for tensor in (t for group in groups for t in group["params"]):
                state = begun.get(id(parameters[tensor.spec.name]), {})
                initial[tensor] = _part(state, tensor)
        return twin_of(client, groups, initial, needs_restart)

    return InnerOptimizers(name, client.param_groups, make, client)


def twin_of(
    client: torch.optim.Optimizer,
    groups: list[Group],
    initial: dict[torch.Tensor, dict] | None = None,
    restarts: bool = False,
) -> torch.optim.Optimizer:
    """Return an optimizer like `client`, on other parameters, with a state of its own that begins with `initial`."""
    # The arguments of its class's `__init__` are not known here.
    twin = object.__new__(type(client))
    attributes = client.__dict__.items()
    twin.__dict__.update(
        {
            name: OrderedDict() if "_hooks" in name else value
            for name, value in attributes
        }
    )
    twin.__dict__.pop("step", None)  # a scheduler counts the calls of the client's
    twin.param_groups = groups
    twin.state = defaultdict(dict)

    begins = initial or {}

    def restart(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Give all, or some, of its tensors the state with which the optimizer begins."""
        for tensor in parameters_of(self) if tensors is None else tensors:
            self.state.pop(tensor, None)
            if tensor in begins:
                self.state[tensor] = copy.deepcopy(begins[tensor])

    restart(twin)
    if restarts:
        vars(twin)["restart"] = MethodType(restart, twin)
    return twin


def _try(client: torch.optim.Optimizer, has_begun: bool) -> bool:
    """Return by a trial whether the optimizer begins with another state than zeros.

    It runs on the device of the parameters with the numbers of the first group, whose learning rate is
    replaced where it is 0. Raises ConfigError where the optimizer cannot be sharded.
    """
    name = type(client).__name__
    parameters = (p for group in client.param_groups for p in group["params"])
    devices = (p.device for p in parameters if not p.is_meta)
    device = next(devices, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    value, *grads = (
        torch.randn(SHAPE, generator=generator).to(device) for _ in range(UPDATES + 1)
    )
    flat = lambda tensor: [
        tensor.flatten()[:CUT].clone(),
        tensor.flatten()[CUT:].clone(),
    ]
    # The three updates of the table above.
    try:
        whole, states = _updates(
            client, [value.clone()], [[g.clone()] for g in grads], False, has_begun
        )
        parts, _ = _updates(
            client, flat(value), [flat(g) for g in grads], False, has_begun
        )
        zeros, _ = _updates(
            client, flat(value), [flat(g) for g in grads], True, has_begun
        )
    except Exception as error:  # any class of error: the optimizer is the user's
        raise ConfigError(
            f"{name} cannot be run on the shards of ZeRO: on a small tensor it fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    # What they show.
    if not torch.isfinite(whole).all() or torch.equal(whole, value.flatten()):
        raise ConfigError(
            f"a trial of {name} on a small tensor, with the numbers of its first parameter "
            f"group ({_numbers(client)}), does not change the tensor, or makes it infinite. Check these numbers."
        )
    if not torch.allclose(whole, parts, rtol=1e-5, atol=1e-6):
        raise ConfigError(
            f"{name} is not elementwise: it updates a part of a matrix differently from the "
            "whole, and ZeRO gives it parts. Use an elementwise optimizer such as AdamW or "
            "SGD."
        )
    if odd := _odd_states(states):
        raise ConfigError(
            f"{name} keeps {', '.join(odd)} for each parameter, which a checkpoint "
            "that loads at other layouts cannot hold. Use another optimizer, such as AdamW, "
            "RAdam or SGD."
        )
    return not torch.equal(zeros, parts)


def _numbers(client: torch.optim.Optimizer) -> str:
    """Return the numbers of the first group, for messages."""
    return ", ".join(
        f"{key} {number}"
        for key, number in client.param_groups[0].items()
        if isinstance(number, int | float)
    )


def _odd_states(states: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of states that have not one element for each of the tensor."""
    is_long = lambda state: (
        state is None or torch.is_tensor(state) and state.numel() == SHAPE[0] * SHAPE[1]
    )
    kept = ((key, value) for state in states for key, value in state.items())
    return sorted({key for key, value in kept if key != "step" and not is_long(value)})


def _updates(
    client: torch.optim.Optimizer,
    values: list[torch.Tensor],
    grads: list[list[torch.Tensor]],
    zeros: bool,
    has_begun: bool,
) -> tuple[torch.Tensor, list[dict]]:
    """(flat values after one update for each of `grads`, states). zeros: these exist before, as zeros."""
    parameters = [nn.Parameter(value) for value in values]
    group = {**client.param_groups[0], "params": parameters}
    if not group.get("lr", 1):
        group["lr"] = 0.01
    initial: dict[torch.Tensor, dict] = {}
    if has_begun:
        initial |= {p: _fresh_state(client, p) for p in parameters}
    twin = twin_of(client, [group], initial)
    if zeros and not has_begun:
        _create_zeros(twin, group, parameters)
    for step in grads:
        for p, grad in zip(parameters, step):
            p.grad = grad.clone()
        twin.step()
    return torch.cat([p.detach().flatten() for p in parameters]), list(
        twin.state.values()
    )


def _create_zeros(
    twin: torch.optim.Optimizer, group: Group, parameters: list[nn.Parameter]
) -> None:
    """Create the state by an update that changes nothing, as `InnerOptimizer` does."""
    numbers: Group = {key: group[key] for key in ("lr", "weight_decay") if key in group}
    group.update({key: 0.0 for key in numbers})
    for p in parameters:
        p.grad = torch.zeros_like(p)
    twin.step()
    group.update(numbers)
    for state in twin.state.values():
        if torch.is_tensor(state.get("step")):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0


def _fresh_state(client: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Any]:
    """Return the state that the client's class gives a parameter at once, taken from a new instance."""
    known = inspect.signature(type(client).__init__).parameters.keys() - {
        "self",
        "params",
    }
    made = type(client)(
        [p], **{k: v for k, v in client.param_groups[0].items() if k in known}
    )
    return dict(made.state[p])


def _part(state: dict[str, Any], tensor: LeafTensor) -> dict[str, Any]:
    """Return the part of a whole parameter's state for the master `tensor` of one piece; padding gets zeros."""
    piece = tensor.piece
    result = {}
    for key, value in state.items():
        if torch.is_tensor(value) and value.dim():
            part = torch.zeros(
                tensor.numel(), dtype=torch.float32, device=tensor.device
            )
            part[: piece.stop - piece.start] = value.detach().flatten()[
                piece.start : piece.stop
            ]
            value = part
        result[key] = value
    return result
