"""Rules about adapters."""

from collections.abc import Iterator

from ...config.added_weights import FROZEN_BLOCK
from ...config.options.model import ModelConfig
from ...config.run import RunConfig
from .options import LoraConfig
from .targets import TARGETS


def targets(config: RunConfig) -> Iterator[str]:
    """A target is a layer or some of its rows, and the model has those rows."""
    adapters = config.of(LoraConfig)
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
    if "q_proj" in chosen and getattr(config.model, "attention_output_gate", False):
        yield (
            "[adapters.lora_target_modules] names q_proj, whose rows are those of queries, and with "
            "--attention-output-gate the q_proj of other programs has gates too. Use linear_qkv."
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
    """Dropout of adapters needs the positions of the tokens, which tiles of a feed-forward lack."""
    adapters = config.of(LoraConfig)
    if not adapters.is_on or not adapters.lora_dropout:
        return
    layers = {TARGETS[name].layer for name in adapters.targets}
    in_feed_forward = layers & {"linear_fc1", "linear_fc2"}
    if in_feed_forward and config.train.tiled_mlp != 1:
        yield (
            "[adapters.lora_dropout] with [train.tiled_mlp]: a tile of a feed-forward does not know the positions of "
            "its tokens. Use --lora-dropout 0, or --tiled-mlp 1."
        )


def frozen_weights(config: RunConfig) -> Iterator[str]:
    """Encoded weights are on the device of a rank, whose blocks of numbers are those of one process."""
    adapters = config.of(LoraConfig)
    if not adapters.lora_base_bits:
        return
    zero = config.zero
    for is_on, option, change in (
        (zero.offload_param != "none", "offload_param", "--offload-param none"),
        (zero.zero_hpz_partition_size > 1, "zero_hpz_partition_size", "1 for it"),
        (zero.zero_quantized_weights, "zero_quantized_weights", "one of the two"),
    ):
        if is_on:
            yield (
                f"[adapters.lora_base_bits] keeps the frozen weights encoded on the device of each rank, which "
                f"[zero.{option}] would place or send otherwise. Use {change}."
            )
    # Tensor-parallel ranks have whole rows, or the columns of a rank.
    t = config.parallel.tensor_model_parallel_size
    if t == 1:
        return
    for what, columns in _columns(config.model, t):
        if columns % FROZEN_BLOCK:
            yield (
                f"[adapters.lora_base_bits] with [parallel.tensor_model_parallel_size]: a rank has {columns} "
                f"columns of {what}, and {FROZEN_BLOCK} numbers of a row have one scale, which ranks would cut "
                f"differently. Use a size with which it has a multiple of {FROZEN_BLOCK}."
            )


def _columns(model: ModelConfig, ranks: int) -> Iterator[tuple[str, int]]:
    """(layer, columns of its weight that a rank has), of the linear layers of a block."""
    yield "linear_qkv and linear_fc1", model.hidden_size
    # Plans without torch read these rules.
    from ...models.mixers import mixers_of

    for mixer in mixers_of(model):
        for name, (columns, _) in mixer.linear_layers(model).items():
            if name in ("linear_proj", "out_proj"):
                yield name, columns // ranks
    if not all(model.experts):
        yield "linear_fc2", model.ffn_size // ranks
    if any(model.experts):
        yield "the linear_fc2 of experts", model.expert_ffn_size // ranks
        if model.dense_width:
            yield "the dense linear_fc2 beside experts", model.dense_width // ranks
