"""`RoutingConfig`: which layers see which tokens."""

from dataclasses import dataclass

from .option import option

_LTD = "data_efficiency.data_routing.random_ltd"


@dataclass(frozen=True)
class RoutingConfig:
    """Random layer-wise token dropping (docs/data_efficiency.md): blocks that see a random part of the tokens, which grows."""

    random_ltd: bool = option(
        False, help="Let some blocks work on a random part of the tokens, more of them as training goes on (random-LTD).",
        avoid="It pays where blocks are most of the work, and it changes what is trained. Compare losses on a small run.")
    random_ltd_total_layers: int | None = option(
        None, at_least=1, json=f"{_LTD}.total_layer_num", help="Insist on so many blocks: an error if the model has others.",
        avoid="The model knows its layers.")
    random_ltd_layer_ids: tuple[int, ...] = option(
        (), at_least=0, json=f"{_LTD}.random_ltd_layer_id", help="Numbers of the blocks that drop tokens, from 0. Default: "
        "all but the first and the last.")
    random_ltd_min_tokens: int | None = option(
        None, at_least=1, unit="tokens", json=f"{_LTD}.random_ltd_schedule.min_value",
        help="Tokens of each sequence that they keep in the first step.")
    random_ltd_max_tokens: int | None = option(
        None, at_least=1, unit="tokens", json=f"{_LTD}.random_ltd_schedule.max_value",
        help="Tokens that they keep in the end. Default: the sequence length, which is all.",
        avoid="With fewer than all the run never trains as it is evaluated.")
    random_ltd_steps: int | None = option(
        None, at_least=1, unit="steps", json=f"{_LTD}.random_ltd_schedule.schedule_config.require_steps",
        help="Steps from the first number to the last, along a line. A good start are two thirds of the run.")
    random_ltd_tokens_per_step: int = option(
        16, at_least=1, unit="tokens", json=f"{_LTD}.random_ltd_schedule.schedule_config.seq_per_step",
        help="The number of kept tokens is rounded down to a multiple of this.",
        avoid="Kernels like multiples of 8, on GPUs of 64.")
