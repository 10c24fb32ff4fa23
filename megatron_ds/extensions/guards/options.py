"""`GuardOptions`: the part of `TrainConfig` of steps that are dropped, computed again or compared."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option


@dataclass(frozen=True)
class GuardOptions:
    """Guards against bad data and faulty hardware."""

    skip_spikes: float | None = option(
        None,
        above=1,
        help="Drop the update of a step, as after an overflow, when the norm of its gradient is more than this "
        "factor times a quantile of the norms of recent updates. Its samples are recorded in metrics.jsonl.",
        avoid="Samples of dropped steps are not trained on. A small factor drops good steps too: begin at 3.",
    )
    skip_spikes_quantile: float = option(
        0.9,
        above=0,
        at_most=1,
        needs=need("train.skip_spikes"),
        help="The quantile of recent norms with which --skip-spikes compares: 0.5 is the median, 1 the maximum.",
    )
    skip_spikes_window: int = option(
        128,
        at_least=1,
        unit="iterations",
        needs=need("train.skip_spikes"),
        help="Updates whose norms --skip-spikes keeps. It drops nothing before that many were made.",
    )
    skip_spikes_limit: int = option(
        10,
        at_least=1,
        unit="iterations",
        needs=need("train.skip_spikes"),
        help="Stop the run with an error when --skip-spikes drops this many updates in a row.",
    )
    check_weight_hash_across_dp_replicas_interval: int | None = option(
        None,
        at_least=1,
        unit="iterations",
        help="Compare the weights of data-parallel ranks at steps that are a multiple of this, and stop if "
        "they differ. With ZeRO stage 3 only those that are whole on every rank.",
        avoid="It copies all weights to the host.",
    )
    rerun_bad_steps: bool = option(
        False,
        help="Compute a step again, before its update, when its loss or gradient is not finite or it is a spike of "
        "--skip-spikes, and compare the bits: a transient fault of the hardware is logged with its rank and the "
        "run goes on with the gradients that repeat. Not after an overflow of dynamic loss scaling.",
        avoid="Each step reads all gradients once more, for their checksum. On a GPU add --deterministic-mode: "
        "other operations do not repeat their bits.",
    )
    rerun_steps_interval: int | None = option(
        None,
        at_least=1,
        unit="iterations",
        needs=need("train.rerun_bad_steps"),
        help="With --rerun-bad-steps, compute also every step again that is a multiple of this, whatever its "
        "result.",
        avoid="A step that is computed again takes twice its time.",
    )
