"""`collective`: methods of an engine that all ranks must call, with errors that name the call.

Where only some ranks call one (`save_checkpoint` on rank 0 alone), each rank waits in another collective
until the timeout of the process group. The error then lists which rank was in which call
(mpu/stuck_ranks.py).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...errors import CommunicationError
from ...mpu.stuck_ranks import doing

Given = ParamSpec("Given")
Result = TypeVar("Result")
LAYERS = (
    "ZeRO stage 3 gathers layers together, so all ranks must call the same layers in the same order. "
    "Mark a module inside of which they choose different ones, such as a list of experts, before "
    "initialize: megatron_ds.utils.set_z3_leaf_modules(model, [Class])."
)


def collective(
    method: Callable[Concatenate[Any, Given], Result],
) -> Callable[Concatenate[Any, Given], Result]:
    """Return the method of an engine, with its name in errors of collectives."""

    @wraps(method)
    def call(engine: Any, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            with doing(
                f"engine.{method.__name__} (global_steps {engine.global_steps})"
            ):
                return method(engine, *args, **kwargs)
        except CommunicationError as error:
            if engine.gathering is not None and LAYERS not in str(error):
                error.args = (f"{error} {LAYERS}",)
            raise

    return call
