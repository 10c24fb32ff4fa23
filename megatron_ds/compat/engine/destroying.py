"""`destroy`: the end of an engine, after which its module is a plain one again."""

from contextlib import nullcontext

import torch
from torch import nn

from ...mpu.managed_parameter import SUM
from . import watched
from .gradients import EngineParameter, store_of
from .status import EngineStatus

# Attributes of the parameters of an engine (zero/buckets.py, initialization.py).
ADDED = ("engine", SUM)


@torch.no_grad()
def destroy(engine: EngineStatus) -> None:
    """Give the module its weights in memory of its own, and remove the engine's hooks. Collective.

    At stage 3 each rank then holds the whole module. The engine computes with the module, but trains no more;
    a new engine may take the module.
    """
    if engine.is_destroyed:
        return
    # Values, while all are whole.
    engine.discard_gradients()
    engine.zero.wait_for_weights()
    parameters = list(engine.module.parameters())
    with engine.gathering.whole(parameters) if engine.gathering else nullcontext():
        values = {p: p.detach().clone() for p in parameters}
    # Curves, then plain parameters and modules.
    engine.monitor.close()
    for s in engine.zero.trained:
        for hook in store_of(s).hooks:
            hook.remove()
    for p, value in values.items():
        for name in ADDED:
            p.__dict__.pop(name, None)
        p.__class__ = nn.Parameter if isinstance(p, EngineParameter) else p.__class__
        p.data = value
        p.grad = None
    watched.remove(engine.module)
    engine.gathering = None
    engine.is_destroyed = True
