"""`specs_of`: what a model has, before any of it is built."""

import torch

from ..config.options.model import ModelConfig
from ..moe.balance import balances_of
from ..mpu.context import ParallelContext
from ..mpu.managed_parameter import spec_of
from ..mpu.param_spec import ParamSpec
from .architecture import MODELS
from .stage_modules import build_stage


def specs_of(model: ModelConfig) -> list[ParamSpec]:
    """Specs of all weights and of the state that routers keep between steps. Allocates nothing."""
    modules = build_stage(
        MODELS[model.model](model, ParallelContext(device=torch.device("meta")))
    )
    specs = [spec_of(parameter) for parameter in modules.parameters()]
    for balance in balances_of(modules):
        specs += balance.specs.values()
    return specs
