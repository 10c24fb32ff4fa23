"""Rules about adapters."""

from collections.abc import Iterator

from ...config.run import RunConfig
from .lora_targets import TARGETS


def targets(config: RunConfig) -> Iterator[str]:
    """A target is a layer or some of its rows, and the model has those rows."""
    adapters = config.adapters
    if not adapters.is_on:
        return
    # A layer with an adapter for all rows has none for some of them.
    chosen = adapters.targets
    for name in chosen:
        layer = TARGETS[name].layer
        if TARGETS[name].part is not None and layer in chosen:
            yield (
                f"[adapters.lora_target_modules] names {layer} and {name}, whose rows are among those of {layer}. "
                "Give one of them."
            )
    # Parts of the first layer of a feed-forward exist where it is gated, and not in experts.
    parts = [name for name in ("gate_proj", "up_proj") if name in chosen]
    if parts and not config.model.is_gated:
        yield (
            f"[adapters.lora_target_modules] names {parts[0]}, but the feed-forward of this model is not gated. Use "
            "linear_fc1."
        )
    elif parts and any(config.model.experts):
        yield (
            f"[adapters.lora_target_modules] names {parts[0]}: the gated rows of experts have one adapter "
            "together. Use linear_fc1."
        )


def dropout(config: RunConfig) -> Iterator[str]:
    """Dropout of adapters needs the positions of the tokens, which experts and tiles of a feed-forward lack."""
    adapters = config.adapters
    if not adapters.is_on or not adapters.lora_dropout:
        return
    layers = {TARGETS[name].layer for name in adapters.targets}
    in_feed_forward = layers & {"linear_fc1", "linear_fc2"}
    if in_feed_forward and any(config.model.experts):
        yield (
            "[adapters.lora_dropout] with adapters of experts: the tokens of an expert are not in the order of their "
            "positions. Use --lora-dropout 0, or --lora-target-modules linear_qkv linear_proj."
        )
    elif in_feed_forward and config.train.tiled_mlp != 1:
        yield (
            "[adapters.lora_dropout] with [train.tiled_mlp]: a tile of a feed-forward does not know the positions of "
            "its tokens. Use --lora-dropout 0, or --tiled-mlp 1."
        )


LORA_RULES = (targets, dropout)
