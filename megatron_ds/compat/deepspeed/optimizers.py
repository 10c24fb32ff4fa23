"""DeepSpeed's optimizers Lion, Lamb and Adagrad as classes, for `initialize(optimizer=…)`. FusedAdam and
DeepSpeedCPUAdam are in ops/adam.py.
"""

from collections.abc import Iterable
from typing import Any

from ...errors import ConfigError
from ...features import Provided

# A module of `Adagrad`, `Lamb`, `LambRule` and `Lion`.
CLASSES: Provided[Any] = Provided("optimizer classes")
classes = CLASSES.get()
Adagrad: Any = classes.Adagrad
Lamb: Any = classes.Lamb
Lion: Any = classes.Lion


class FusedLion(Lion):
    """`Lion` with DeepSpeed's arguments. set_grad_none has no effect."""

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ):
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(FusedLion):
    """`FusedLion` with the arguments of DeepSpeed's Lion for CPUs. "offload_optimizer" places its state."""

    def __init__(
        self,
        model_params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ):
        _check_states(type(self).__name__, fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


class DeepSpeedCPUAdagrad(Adagrad):
    """`Adagrad` with DeepSpeed's arguments."""

    def __init__(
        self,
        model_params: Iterable,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ):
        _check_states(type(self).__name__, fp32_optimizer_states)
        super().__init__(model_params, lr, eps, weight_decay)


class FusedLamb(Lamb):
    """`Lamb` with DeepSpeed's arguments, for whole parameters. set_grad_none has no effect.

    An engine makes its own, from "optimizer" in the JSON.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        if max_grad_norm or amsgrad:
            raise ConfigError(
                "FusedLamb(max_grad_norm=…, amsgrad=…) is not supported. Leave them out; "
                '"gradient_clipping" in the config clips.'
            )
        rule = classes.LambRule(
            bias_correction=bias_correction, eps_inside_sqrt=eps_inside_sqrt
        )
        super().__init__(
            params,
            rule,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )


def _check_states(name: str, fp32: bool) -> None:
    if not fp32:
        raise ConfigError(
            f"{name}(fp32_optimizer_states=False) is not supported: states are fp32. Leave the "
            "argument out."
        )
