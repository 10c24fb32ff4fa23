"""The block "tensor_parallel" of an engine's JSON, which divides the model over ranks: DeepSpeed's AutoTP.

A size of 0 or 1 divides nothing; the block is then read with the other keys (json_settings.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...config.sources.reading import reject
from ...registry import did_you_mean

BLOCK = "tensor_parallel"
SIZE = "autotp_size"
RULES = "partition_config"
NESTED = ("tp", "tensor_parallel")  # DeepSpeed's inner block, and its alias
# key → what takes its place
WITHOUT_EFFECT = {
    "tp_overlap_comm": "gradients are summed over ranks after the backward of a layer, which changes no number",
    "preset_model": "the model's own plan is used, or known names of layers",
    "keep_module_on_host": "each rank's part moves to its device",
    "replace_with_kernel_inject": "the model's own operations are used",
    "kernel_inject": "the model's own operations are used",
}
# key → (values that ask for nothing, what to do instead)
REFUSED: Mapping[str, tuple[tuple, str]] = {
    "injection_policy_tuple": (
        (None,),
        'write "partition_config" (docs/use/engine.md).',
    ),
    "vocab_parallel_lm_head": (
        (None, False),
        "the loss is computed from all logits: an output layer with weights of its own is divided, and its results "
        "are gathered. Leave it out.",
    ),
    "vocab_parallel_ce_backend": (
        ("torch",),
        "the loss is the model's own. Leave it out.",
    ),
    "dtype": (
        (None,),
        'the blocks "bf16" and "fp16" set the number format. Leave it out.',
    ),
}
# The sizes of a batch: of an update, of a micro-batch, and the micro-batches of an update.
SIZES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
KNOWN = (SIZE, RULES, *NESTED, *WITHOUT_EFFECT, *REFUSED)


@dataclass(frozen=True)
class DivisionKeys:
    """What the block asks for.

    size    tensor-parallel ranks
    rules   "partition_config"; None: the model's plan
    unused  the keys that were given and have no effect
    """

    size: int = 1
    rules: Mapping[str, Any] | None = None
    unused: tuple[str, ...] = ()


def divides(block: Mapping[str, Any]) -> bool:
    """Return whether the JSON asks for more than one tensor-parallel rank."""
    keys = block.get(BLOCK)
    size = keys.get(SIZE) if isinstance(keys, Mapping) else None
    return type(size) is int and size > 1


def without_division(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON without the block, where it asks for more than one rank."""
    if not divides(block):
        return block
    return {key: value for key, value in block.items() if key != BLOCK}


def division_keys(name: str, block: Mapping[str, Any]) -> DivisionKeys:
    """Return what the block asks for. Raises one ConfigError with all problems.

    name  of the config in messages
    """
    if not divides(block):
        return DivisionKeys()
    keys = block[BLOCK]
    reject([f"{name}: {problem}" for problem in _problems(keys)])
    unused = tuple(key for key in keys if key in WITHOUT_EFFECT and keys[key])
    return DivisionKeys(keys[SIZE], keys.get(RULES), unused)


def with_sizes_of_data(
    block: Mapping[str, Any], size: int, data_parallel_size: int
) -> dict[str, Any]:
    """Return the JSON with a train_batch_size that counts the samples of data-parallel ranks.

    DeepSpeed and transformers count every rank, also those that compute the same samples together.
    size  the number of tensor-parallel ranks
    """
    total, micro, steps = (block.get(key) for key in SIZES)
    if size == 1 or not isinstance(micro, int) or not isinstance(steps, int):
        return dict(block)
    samples = micro * steps * data_parallel_size
    return {**block, SIZES[0]: samples} if total == samples * size else dict(block)


def _problems(keys: Mapping[str, Any]) -> Iterator[str]:
    for key, value in keys.items():
        if key not in KNOWN:
            near = did_you_mean(key, list(KNOWN)) or "."
            yield f'unknown key "{BLOCK}.{key}"{near} Leave it out.'
        elif key in REFUSED and value not in REFUSED[key][0]:
            advice = REFUSED[key][1]
            yield f'"{BLOCK}.{key}": {value!r} is not available in an engine: {advice}'
        elif key in NESTED:
            yield from _inner_problems(key, value, keys[SIZE])


def _inner_problems(block: str, inner: Any, size: int) -> Iterator[str]:
    if not isinstance(inner, Mapping):
        yield f'"{BLOCK}.{block}" is {inner!r}: it is a block with "tp_size".'
        return
    allowed = {"tp_size": (1, size), "tp_grain_size": (1,)}
    for key, value in inner.items():
        if value not in allowed.get(key, (None,)):
            yield (
                f'"{BLOCK}.{block}.{key}" is {value!r} beside "{BLOCK}.{SIZE}": {size}. Leave it out; process groups '
                "are given by mpu= of initialize."
            )
