"""Values for the "auto" of a DeepSpeed JSON that is checked without its program: the defaults of transformers' Trainer.

They stand for the arguments of a program, which only it knows; a check finds out whether the rest of the JSON
works with some.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from ..config.deepspeed_json import auto_keys
from ..engine.json_settings import Sources, fill_autos

ARGUMENTS = SimpleNamespace(
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    learning_rate=5e-5,
    weight_decay=0.0,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_epsilon=1e-8,
    max_grad_norm=1.0,
    max_steps=10_000,  # more than the warm-up of a scheduler without a number, 1,000
    warmup_steps=0,
    fp16=False,
    bf16=False,
)
HIDDEN_SIZE = 4096
BATCH_SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


class ModelOfTrainer(nn.Module):
    """A model of transformers, of which only the hidden size is known."""

    config = SimpleNamespace(hidden_size=HIDDEN_SIZE)


def with_trainer_values(
    block: Mapping[str, Any], ranks: int
) -> tuple[dict[str, Any], list[str]]:
    """Return (a copy of the block with values for "auto", the keys that got one)."""
    asked = auto_keys(block)
    # An engine derives the open sizes from a batch that is given, as a program's arguments must fit to it.
    if isinstance(block.get(BATCH_SIZES[0]), int):
        block = {
            key: value
            for key, value in block.items()
            if not (key in BATCH_SIZES and value == "auto")
        }
    filled = fill_autos(block, Sources(ARGUMENTS, ModelOfTrainer(), ranks))
    left = auto_keys(filled)
    return filled, [key for key in asked if key not in left]
