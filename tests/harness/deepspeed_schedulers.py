"""DeepSpeed's own schedulers, without starting the rest of DeepSpeed."""

import importlib.util
import logging
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

FILE = "runtime/lr_schedules.py"


class Groups(torch.optim.Optimizer):
    """Only the numbers of an Adam. (torch's `__init__` would import its compiler.)"""

    def __init__(self, lr: float, betas: tuple[float, float] = (0.9, 0.95)):
        self.param_groups = [{"params": [], "lr": lr, "betas": betas}]
        self.defaults = {"betas": betas}


@cache
def deepspeeds() -> ModuleType:
    """The module of the schedulers; the test is skipped where DeepSpeed is not installed."""
    found = importlib.util.find_spec("deepspeed")
    if found is None:
        pytest.skip("DeepSpeed is not installed: pip install deepspeed")
    spec = importlib.util.spec_from_file_location(
        "deepspeeds_schedulers", Path(found.origin).parent / FILE
    )
    module, utils = importlib.util.module_from_spec(spec), ModuleType("deepspeed.utils")
    utils.logger = logging.getLogger("deepspeed")
    with patch.dict(
        sys.modules, {"deepspeed": ModuleType("deepspeed"), "deepspeed.utils": utils}
    ):
        spec.loader.exec_module(module)
    return module


def rates_of(
    kind: str, lr: float, steps: int, params: dict
) -> list[tuple[float, float]]:
    """(learning rate, beta1) of the first steps: the engine steps the scheduler after the optimizer."""
    optimizer = Groups(lr)
    scheduler = getattr(deepspeeds(), kind)(optimizer, **params)
    found = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        found.append((group["lr"], group["betas"][0]))
        scheduler.step()
    return found
