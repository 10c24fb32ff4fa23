"""The registry of optimizers: functions from parameter groups and `OptimizerConfig` to a torch optimizer.
With the groups of parameters, and `CpuAdamW`, torch's interface to ops/cpu/compiled_adam.py.

An entry receives groups {"params": [fp32 tensors], "decay": bool, "lr_factor": float}; "lr" and
"weight_decay" of each group are set before every step. Its state tensors have as many elements as the
parameter, apart from a count named "step".

By default an entry must treat elements one by one: its tensors are flat and may be parts of parameters. An
entry that needs whole matrices has the attribute `needs_whole_tensors = True`; one that needs norms of whole
parameters has `needs_norms = True`; one that chooses its parameter groups has `param_groups`, a function from
the optimizer's section of the configuration to groups. A new optimizer with groups is therefore one file.

A run has a list of `ParamGroup`s. A parameter belongs to the first group whose filter accepts its spec.
Groups may use different optimizers: matrices an orthogonalising one and the rest AdamW, for example. Without
other instructions there are two groups of one optimizer, with and without weight decay.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..config import OptimizerConfig
from ..errors import ConfigError
from ..host.memory_maps import huge_page_zeros
from ..mpu.param_spec import ParamSpec
from ..ops.adam import AdamRow
from ..ops.cpu.compiled_adam import adamw_, extension
from ..registry import Registry


class CpuAdamW(torch.optim.Optimizer):
    """AdamW on contiguous fp32 CPU parameters. Needs the extension (`ops.cpu.compiled_adam.extension()`).

    Names and shapes of its state are those of torch.optim.AdamW, so checkpoints are interchangeable.

    grad_scale         None or a tensor: each gradient is divided by it while it is read, and not written
    parameter.low      optional, a 16-bit tensor of the same length: receives the updated value, rounded
    threads, variant   as in `ops.cpu.compiled_adam.adamw_`
    """

    _step_supports_amp_scaling = True      # torch's name for support of `grad_scale`
    writes_low = True

    def __init__(self, params: Iterable, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.01, *, threads: int | None = None,
                 variant: str = ""):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.threads, self.variant = threads, variant
        self.grad_scale: torch.Tensor | None = None

    def add_param_group(self, param_group: dict) -> None:
        """Torch's method without its decorator, whose first call imports the compiler: more than a second."""
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """Update the parameters; returns the loss of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = 1.0 if self.grad_scale is None else 1.0 / float(self.grad_scale)
        for group in self.param_groups:
            rows = [self._row(p) for p in group["params"] if p.grad is not None]
            adamw_(rows, lr=float(group["lr"]), betas=group["betas"], eps=group["eps"],
                   weight_decay=group["weight_decay"], grad_scale=scale, threads=self.threads,
                   variant=self.variant)
        return loss

    def _row(self, p: torch.Tensor) -> AdamRow:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = huge_page_zeros(p.numel()).view(p.shape)
        state["step"] += 1
        return AdamRow(p, p.grad, state["exp_avg"], state["exp_avg_sq"], int(state["step"]),
                       getattr(p, "low", None))


logger = logging.getLogger(__name__)

OPTIMIZERS: Registry[Callable[..., torch.optim.Optimizer]] = Registry("optimizer")


@OPTIMIZERS.register("adam", "adamw")
def adam(groups: list[dict], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Megatron's "adam": decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2).

    fp32 masters on the CPU are updated by the kernel of this package if it was compiled.
    """
    options = dict(lr=0.0, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_eps)
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32
                 for group in groups for p in group["params"])
    if on_cpu and extension():
        return CpuAdamW(groups, **options)
    return _fused(torch.optim.AdamW, groups, **options)


@OPTIMIZERS.register("sgd")
def sgd(groups: list[dict], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Momentum 0.9 unless `settings.sgd_momentum` gives another; weight decay is added to the gradient."""
    return _fused(torch.optim.SGD, groups, lr=0.0, momentum=getattr(settings, "sgd_momentum", 0.9))


def _fused(kind: type, groups: list[dict], **options) -> torch.optim.Optimizer:
    """One kernel over all tensors; torch's multi-tensor implementation if the device has no fused one."""
    try:
        return kind(groups, fused=True, **options)
    except RuntimeError as reason:
        logger.warning("%s runs unfused: %s", kind.__name__, reason)
        return kind(groups, foreach=True, **options)


class MakeOptimizer(Protocol):
    """Makes a torch optimizer from parameter groups {"params": [...], "decay": bool, "lr_factor": float}.

    Attributes state what it needs; all are False where absent:

    needs_whole_tensors  each tensor of a group is a whole parameter of its own shape, not a flat part of one
    needs_norms          it is called with the keyword `reduce_norms` (zero/norm.py `ParameterNorms`)
    """

    def __call__(self, groups: list[dict[str, Any]], /, **options: Any) -> torch.optim.Optimizer: ...


@dataclass(frozen=True)
class ParamGroup:
    """The parameters that `filter` accepts, updated by `optimizer`, with or without weight decay.

    lr_factor: the learning rate of the group is that of the schedule multiplied by this.
    """

    name: str
    filter: Callable[[ParamSpec], bool]
    optimizer: MakeOptimizer
    lr_factor: float = 1.0
    decay: bool = True

    @property
    def needs_whole_tensors(self) -> bool:
        """Whether one rank must hold a whole parameter to update it."""
        return getattr(self.optimizer, "needs_whole_tensors", False)

    @property
    def needs_norms(self) -> bool:
        """Whether the optimizer uses norms of whole parameters."""
        return getattr(self.optimizer, "needs_norms", False)


@dataclass(frozen=True)
class RegisteredOptimizer:
    """A `MakeOptimizer`: an entry of the registry with the numbers of the configuration."""

    name: str
    settings: OptimizerConfig

    def __call__(self, groups: list[dict[str, Any]], /, **options: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.name](groups, settings=self.settings, **options)

    @property
    def needs_whole_tensors(self) -> bool:
        """As the entry declares."""
        return getattr(OPTIMIZERS[self.name], "needs_whole_tensors", False)

    @property
    def needs_norms(self) -> bool:
        """As the entry declares."""
        return getattr(OPTIMIZERS[self.name], "needs_norms", False)


def default_groups(optimizer: MakeOptimizer) -> tuple[ParamGroup, ...]:
    """Parameters with weight decay, then those without."""
    return (ParamGroup("decay", lambda spec: spec.decay, optimizer),
            ParamGroup("no decay", lambda spec: not spec.decay, optimizer, decay=False))


def param_groups_of(settings: OptimizerConfig) -> tuple[ParamGroup, ...]:
    """The groups of `--optimizer`: those that its entry chooses, else the default ones."""
    entry = OPTIMIZERS[settings.optimizer]
    choose = getattr(entry, "param_groups", None)
    return choose(settings) if choose else default_groups(RegisteredOptimizer(settings.optimizer, settings))


def group_of(spec: ParamSpec, groups: Sequence[ParamGroup]) -> ParamGroup:
    """The first group that accepts the parameter. Raises ConfigError if none does."""
    for group in groups:
        if group.filter(spec):
            return group
    names = ", ".join(group.name for group in groups)
    raise ConfigError(f"{spec.name} belongs to none of the parameter groups {names}, so no optimizer "
                      "would update it. Add a group whose filter accepts it.")
