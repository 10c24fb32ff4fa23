"""Options of measurements: the FLOPs profile, the communication log and runs that an autotuner starts, under
DeepSpeed's names, and the gradient noise scale."""

from dataclasses import dataclass

from ...config.options.need import need
from ...config.options.option import option

# The operations that communication is counted by (mpu/group.py).
COMMUNICATION = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "reduce",
    "send",
)


@dataclass(frozen=True)
class ProfilerConfig:
    """A profile is of one step. Its FLOPs follow from the formulas of the layers, its times are measured."""

    profile: bool = option(
        False,
        help="Profile a few steps: with --use-pytorch-profiler torch's profiler writes a Chrome trace; without "
        "it the steps are marked for Nsight Systems (nsys profile -c cudaProfilerApi), on GPUs alone.",
        avoid="The profiled steps are slower.",
    )
    use_pytorch_profiler: bool = option(
        False,
        needs=need("profiler.profile"),
        help="Profile with torch's profiler, on CPUs, too.",
    )
    profile_step_start: int = option(
        10,
        at_least=0,
        unit="steps",
        needs=need("profiler.profile"),
        help="Profile the steps after this many steps of the run.",
    )
    profile_step_end: int = option(
        12,
        at_least=1,
        unit="steps",
        needs=need("profiler.profile"),
        help="The last step that is profiled.",
    )
    profile_ranks: tuple[int, ...] = option(
        (0,),
        at_least=0,
        needs=need("profiler.profile"),
        help="The ranks that are profiled.",
    )
    profile_dir: str = option(
        "profile",
        per_host=True,
        needs=need("profiler.use_pytorch_profiler"),
        help="Folder of the traces, profile-rank-N.json.",
    )
    record_memory_history: bool = option(
        False,
        help="Record the memory of rank 0 by owner, planned beside measured; on GPUs rank 0 and the last rank "
        "also record every allocation, for https://pytorch.org/memory_viz.",
        avoid="Allocations are slower on GPUs; on CPUs the second step is.",
    )
    memory_snapshot_path: str = option(
        "snapshot.pickle",
        per_host=True,
        needs=need("profiler.record_memory_history"),
        help="File for --record-memory-history, on CPUs as JSON; of other ranks than 0, with the rank in its name.",
    )
    flops_profiler: bool = option(
        False,
        json="flops_profiler.enabled",
        help="Print a table of the layers with parameters and FLOPs, and the times of a step, once.",
    )
    flops_profiler_step: int = option(
        1,
        json="flops_profiler.profile_step",
        at_least=0,
        unit="steps",
        needs=need("profiler.flops_profiler"),
        help="Profile the step after this many.",
        avoid="The first steps are slower than the others.",
    )
    flops_profiler_detailed: bool = option(
        True,
        json="flops_profiler.detailed",
        needs=need("profiler.flops_profiler"),
        help="A row for each layer; off: for each kind of layers.",
    )
    flops_profiler_output_file: str | None = option(
        None,
        per_host=True,
        json="flops_profiler.output_file",
        needs=need("profiler.flops_profiler"),
        help="Write the profile to this file, not to the log.",
    )
    grad_noise_scale: bool = option(
        False,
        help="Log the gradient noise scale, in samples: about the batch size from which a larger one saves "
        "few steps (McCandlish et al. 2018).",
        avoid="It needs two micro-batches on each rank, and computes one of them twice in the steps of "
        "--grad-noise-scale-interval.",
    )
    grad_noise_scale_interval: int = option(
        10,
        at_least=1,
        unit="steps",
        needs=need("profiler.grad_noise_scale"),
        help="Steps between measurements of --grad-noise-scale.",
    )
    comms_logger: bool = option(
        False,
        json="comms_logger.enabled",
        help="Record calls, bytes, times and bandwidths of the collectives by operation, group and message size; "
        "rank 0 prints the table when training ends, also by an error.",
    )
    comms_logger_verbose: bool = option(
        False,
        json="comms_logger.verbose",
        needs=need("profiler.comms_logger"),
        help="Log each collective of rank 0.",
    )
    comms_logger_ops: tuple[str, ...] | None = option(
        None,
        choices=COMMUNICATION,
        needs=need("profiler.comms_logger"),
        help="Record these operations only.",
    )
    autotuning: bool = option(
        False,
        json="autotuning.enabled",
        help="Measure a few steps, write latency, throughput and FLOP/s as JSON, and end the run: what "
        "DeepSpeed's autotuner starts.",
        avoid="The run ends after --autotuning-end-step + 1 steps. It does not search for a configuration.",
    )
    autotuning_start_step: int = option(
        3,
        json="autotuning.start_profile_step",
        at_least=0,
        unit="steps",
        needs=need("profiler.autotuning"),
        help="Measure the steps after this many.",
    )
    autotuning_end_step: int = option(
        5,
        json="autotuning.end_profile_step",
        at_least=0,
        unit="steps",
        needs=need("profiler.autotuning"),
        help="The run ends after one more step than this.",
    )
    autotuning_metric_path: str | None = option(
        None,
        per_host=True,
        json="autotuning.metric_path",
        needs=need("profiler.autotuning"),
        help="File for the measured numbers. Default: autotuning_metric.json in the current folder.",
    )
