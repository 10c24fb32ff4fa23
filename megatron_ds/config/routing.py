"""`RoutingConfig`: which layers process which tokens."""

from dataclasses import dataclass

from .option import option

_LTD = "data_efficiency.data_routing.random_ltd"


@dataclass(frozen=True)
class RoutingConfig:
    """Random layer-wise token dropping (docs/data_efficiency.md): blocks process a growing random subset of the tokens."""

    random_ltd: bool = option(
        False, help="Let some blocks process only a random subset of the tokens, which grows during training (random-LTD).",
        avoid="It changes what is trained. Compare losses on a small run first.")
    random_ltd_total_layers: int | None = option(
        None, at_least=1, json=f"{_LTD}.total_layer_num", help="Require this number of blocks: an error if the model has "
        "another.", avoid="Not needed: the number is known from the model.")
    random_ltd_layer_ids: tuple[int, ...] = option(
        (), at_least=0, json=f"{_LTD}.random_ltd_layer_id", help="Numbers of the blocks that drop tokens, from 0. Default: "
        "all except the first and the last.")
    random_ltd_min_tokens: int | None = option(
        None, at_least=1, unit="tokens", json=f"{_LTD}.random_ltd_schedule.min_value",
        help="Tokens of each sequence that these blocks keep in the first step.")
    random_ltd_max_tokens: int | None = option(
        None, at_least=1, unit="tokens", json=f"{_LTD}.random_ltd_schedule.max_value",
        help="Tokens that they keep in the end. Default: the sequence length.",
        avoid="With fewer, the run never trains on the whole sequences that it is evaluated on.")
    random_ltd_steps: int | None = option(
        None, at_least=1, unit="steps", json=f"{_LTD}.random_ltd_schedule.schedule_config.require_steps",
        help="Steps over which the number grows linearly. Two thirds of the run is a good starting point.")
    random_ltd_tokens_per_step: int = option(
        16, at_least=1, unit="tokens", json=f"{_LTD}.random_ltd_schedule.schedule_config.seq_per_step",
        help="The number of kept tokens is rounded down to a multiple of this.",
        avoid="Kernels are fastest with multiples of 8, on GPUs of 64.")
