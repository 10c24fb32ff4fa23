"""DeepSpeed's `data_efficiency.data_routing` → the settings of random-LTD.

The keys of the schedule are declared with their options. The keys here switch the block on, or describe the model to a library
that does not know it; here they are only checked against the model.
"""

from collections.abc import Mapping
from typing import Any

from .option import Option

DATA, ROUTING = "data_efficiency", "data_efficiency.data_routing"
LTD = f"{ROUTING}.random_ltd"
_BOOL = Option(None, "", kind=bool)
SWITCHES = (f"{DATA}.enabled", f"{ROUTING}.enabled", f"{LTD}.enabled")       # all of them, as upstream has it

ROUTING_KEYS: Mapping[str, Option] = {
    **dict.fromkeys(SWITCHES, _BOOL),
    f"{LTD}.random_ltd_layer_num": Option(None, "", kind=int),
    f"{LTD}.model_type": Option(None, "", kind=str, choices=("decoder", "encoder")),
    f"{LTD}.model_mask_name": Option(None, "", kind=str, choices=("attention_mask",)),
    f"{LTD}.hidden_state_order": Option(None, "", kind=str, choices=("seq_batch_dim",)),
    f"{LTD}.random_ltd_schedule.schedule_type": Option(None, "", kind=str, choices=("fixed_linear",)),
    f"{LTD}.layer_token_lr_schedule.enabled": _BOOL}


def random_ltd_is_off(keys: Mapping[str, Any]) -> bool:
    """Whether one of the three blocks around the schedule is not switched on; its values are then ignored."""
    return not all(keys.get(switch) is True for switch in SWITCHES)


def translate_random_ltd(document) -> None:
    """document: a `deepspeed._Document`."""
    on = [document.take(switch) for switch in SWITCHES]
    if not all(on):
        return
    document.give("routing.random_ltd", True, SWITCHES[-1])
    for key in ROUTING_KEYS:
        if key not in SWITCHES:
            document.take(key)
    if document.take(f"{LTD}.layer_token_lr_schedule.enabled"):
        document.wrong.append(f'{document.path}: "{LTD}.layer_token_lr_schedule" is not available, here as in DeepSpeed: the '
                              "learning rate follows samples or steps. Disable it.")
    count, ids = document.take(f"{LTD}.random_ltd_layer_num"), document.take(f"{LTD}.random_ltd_layer_id")
    if count is not None and count != len(ids or ()):
        document.wrong.append(f'{document.path}: "{LTD}.random_ltd_layer_num" is {count}, but "random_ltd_layer_id" names '
                              f"{len(ids or ())} layers. Make them equal, or remove the number.")
