"""Values of the JSON that are "auto", filled as Hugging Face's Trainer fills them: from the program's
arguments and the model.

    batch sizes, clipping, learning rate, …    arguments, under the names of Hugging Face's TrainingArguments
    numbers of steps                           arguments, else epochs over the training data
    bucket sizes of ZeRO                       the hidden size h of the model's config: h², 0.9 h² and 10 h

What cannot be filled stays "auto", and `read_settings` reports all such keys at once.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config.deepspeed_json import auto_keys, with_autos

# Arguments that a key is taken from: the first that `args` has.
NAMES: Mapping[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", "train_micro_batch_size_per_gpu",
                                       "micro_batch_size"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm", "gradient_clipping"),
    "optimizer.params.lr": ("learning_rate", "lr"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate", "lr"),
    "fp16.enabled": ("fp16",), "bf16.enabled": ("bf16",)}
STEPS = ("max_steps", "max_train_steps", "num_training_steps")
WARMUP, EPOCHS = ("warmup_steps", "num_warmup_steps"), ("num_train_epochs", "epochs")
HIDDEN_SIZE = "the model's config.hidden_size"


@dataclass(frozen=True)
class Sources:
    """args: any object with attributes.

    samples: of the training data on all ranks, None where there is none.
    """

    args: Any
    model: nn.Module
    data_parallel_size: int
    samples: int | None = None

    def argument(self, *names: str) -> Any | None:
        """The first of these arguments that there is."""
        return next((value for name in names if (value := getattr(self.args, name, None)) is not None), None)

    @property
    def hidden_size(self) -> int | None:
        """Of a model with a config as Hugging Face's have one; the largest where it has several."""
        config = getattr(self.model, "config", None)
        for part in (config, getattr(config, "text_config", None)):
            sizes = getattr(part, "hidden_size", None) or getattr(part, "hidden_sizes", None)
            if sizes:
                return max(sizes) if isinstance(sizes, list | tuple) else sizes
        return None


def fill_autos(block: Mapping[str, Any], sources: Sources) -> dict[str, Any]:
    """A copy of the config in which every "auto" that can be filled has its value.

    Those of stage 3 are left out at others.
    """
    block = copy.deepcopy(dict(block))
    zero = block.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage") != 3:
        kept = {key: value for key, value in zero.items() if value != "auto" or not key.startswith("stage3_")}
        block["zero_optimization"] = kept
    for _ in range(2):          # the second time with the batch sizes that the first has filled
        for key in auto_keys(block):
            value = _value(key, block, sources)
            if value is not None:
                block = with_autos(block, {key: value})
    return block


def source_of(key: str) -> str | None:
    """What would fill a key, for messages; None where nothing does."""
    if key in DERIVED:
        return DERIVED[key][1]
    return f"args.{NAMES[key][0]}" if key in NAMES else None


def _value(key: str, block: Mapping[str, Any], sources: Sources) -> Any | None:
    if key in DERIVED:
        return DERIVED[key][0](block, sources)
    value = sources.argument(*NAMES.get(key, ()))
    if value is None and key in ("fp16.enabled", "bf16.enabled"):
        wanted = torch.float16 if key.startswith("fp16") else torch.bfloat16
        return all(p.dtype == wanted for p in sources.model.parameters())
    return value


def _steps_of_update(block: Mapping[str, Any], sources: Sources) -> int | None:
    """Accumulation steps that follow from the two batch sizes."""
    total, micro = block.get("train_batch_size"), block.get("train_micro_batch_size_per_gpu")
    once = micro * sources.data_parallel_size if isinstance(micro, int) else 0
    return total // once if isinstance(total, int) and once and total % once == 0 else None


def _accumulation(block: Mapping[str, Any], sources: Sources) -> int | None:
    return sources.argument(*NAMES["gradient_accumulation_steps"]) or _steps_of_update(block, sources)


def _train_batch(block: Mapping[str, Any], sources: Sources) -> int | None:
    micro, steps = block.get("train_micro_batch_size_per_gpu"), block.get("gradient_accumulation_steps", 1)
    whole = isinstance(micro, int) and isinstance(steps, int)
    return micro * steps * sources.data_parallel_size if whole else None


def _betas(block: Mapping[str, Any], sources: Sources) -> list[float] | None:
    betas = [sources.argument("adam_beta1"), sources.argument("adam_beta2")]
    return None if None in betas else betas


def _total_steps(block: Mapping[str, Any], sources: Sources) -> int | None:
    steps, epochs = sources.argument(*STEPS), sources.argument(*EPOCHS)
    if steps is not None and steps > 0:         # TrainingArguments has -1 where the epochs count
        return steps
    batch = _train_batch(block, sources)
    if epochs is None or sources.samples is None or not batch:
        return None
    return math.ceil(epochs * max(1, math.ceil(sources.samples / batch)))


def _warmup_steps(block: Mapping[str, Any], sources: Sources) -> int | None:
    steps, ratio = sources.argument(*WARMUP), sources.argument("warmup_ratio")
    if steps is None or not steps and ratio:
        total = _total_steps(block, sources)
        return None if ratio is None or total is None else math.ceil(ratio * total)
    if 0 < steps < 1:                           # a part of training, as newer TrainingArguments have it
        total = _total_steps(block, sources)
        return None if total is None else math.ceil(steps * total)
    return int(steps)


def _of_hidden_size(size: Callable[[int], int]) -> Callable[[Mapping[str, Any], Sources], int | None]:
    return lambda block, sources: None if sources.hidden_size is None else size(sources.hidden_size)


# What takes more than a look at one argument: the function, and what it needs.
DERIVED: Mapping[str, tuple[Callable[[Mapping[str, Any], Sources], Any], str]] = {
    "gradient_accumulation_steps": (_accumulation, "args.gradient_accumulation_steps"),
    "train_batch_size": (_train_batch, "args.per_device_train_batch_size"),
    "optimizer.params.betas": (_betas, "args.adam_beta1 and args.adam_beta2"),
    "scheduler.params.warmup_min_lr": (lambda block, sources: 0.0, ""),
    "scheduler.params.total_num_steps": (
        _total_steps, "args.max_steps, or args.num_train_epochs and training_data"),
    "scheduler.params.warmup_num_steps": (_warmup_steps, "args.warmup_steps"),
    "zero_optimization.reduce_bucket_size": (_of_hidden_size(lambda h: h * h), HIDDEN_SIZE),
    "zero_optimization.stage3_prefetch_bucket_size": (
        _of_hidden_size(lambda h: int(0.9 * h * h)), HIDDEN_SIZE),
    "zero_optimization.stage3_param_persistence_threshold": (_of_hidden_size(lambda h: 10 * h), HIDDEN_SIZE)}
