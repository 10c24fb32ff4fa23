"""`ParallelConfig` and `ZeroConfig`: how ranks split the model and its training state."""

from dataclasses import dataclass

from .need import need
from .option import DTYPE_NAMES, option

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
# Other names of the kinds of context parallelism; the last three are MindSpeed's.
CP_NAMES = {
    "allgather": "all_gather",
    "megatron_cp_algo": "p2p",
    "ulysses_cp_algo": "a2a",
    "hybrid_cp_algo": "a2a+p2p",
}

# Groups of ranks that communicate, named by their axes; below, Megatron's names of some.
COMM_GROUPS = ("tp", "cp", "pp", "dp", "dp-cp", "etp", "ep", "edp", "tp-cp", "tp-pp")
GROUP_NAMES = {"dp_cp": "dp-cp", "tp_cp": "tp-cp", "mp": "tp-pp", "ep_dp": "edp"}

OFFLOADED_TO_DISK = need("zero.offload_optimizer", "nvme") | need(
    "zero.offload_param", "nvme"
)


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the mesh axes. The data-parallel size is the world size divided by the others."""

    tensor_model_parallel_size: int = option(
        1,
        at_least=1,
        flags=["--model-parallel-size"],
        help="Number of ranks that split every layer.",
        avoid="Across nodes the all-reduces of each layer become the bottleneck.",
    )
    pipeline_model_parallel_size: int = option(
        1,
        at_least=1,
        json="pipeline.stages",
        switches={"--no-pipeline-parallel": 1},
        help="Number of ranks that each hold some of the layers.",
        avoid="With fewer than about four times as many micro-batches, ranks wait for each other.",
    )
    context_parallel_size: int = option(
        1,
        at_least=1,
        flags=["--ds-sequence-parallel-size"],
        help="Number of ranks that split each sequence, for long ones; --ds-sequence-parallel-size also sets "
        "--cp-comm-type a2a.",
        avoid="The sequence length must be a multiple of twice this number, of this number with a2a.",
    )
    cp_comm_type: tuple[str, ...] = option(
        ("p2p",),
        choices=COMM_TYPES,
        values=CP_NAMES,
        help="How ranks that split a sequence share attention: p2p passes keys and values around a ring, "
        "all_gather gathers them, a2a (Ulysses) exchanges tokens for heads, a2a+p2p does both on two "
        "levels. One, or one for each layer.",
        avoid="a2a divides the heads that tensor parallelism leaves; it sends less from about 4 ranks on. "
        "all_gather keeps the keys of whole sequences.",
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] = option(
        (1,),
        needs=need("parallel.cp_comm_type", "a2a+p2p"),
        help="For a2a+p2p: the number of neighbouring ranks, as on one node, that exchange tokens for heads, "
        "and the number of such runs, around which keys and values are passed. Their product is "
        "--context-parallel-size.",
    )
    expert_model_parallel_size: int = option(
        1,
        at_least=1,
        flags=["--moe-expert-parallel-size"],
        needs=need("model.num_experts"),
        help="Number of ranks that divide the experts of a layer; a divisor of the data-parallel size, times "
        "tensor-parallel / expert-tensor-parallel size.",
        avoid="It is not the number of experts: that is --num-experts.",
    )
    expert_tensor_parallel_size: int | None = option(
        None,
        at_least=1,
        help="Number of ranks that split every expert, a divisor or a multiple of the tensor-parallel size. "
        "With 1 each expert is whole on its rank, and tensor-parallel ranks have different experts. Default: "
        "the tensor-parallel size.",
        avoid="Needs --sequence-parallel if tensor-parallel ranks are several. A rank holds more of each "
        "expert, so raise --expert-model-parallel-size with it.",
    )
    sequence_parallel: bool = option(
        False,
        help="Split normalization and dropout along the sequence inside a tensor-parallel group: saves "
        "activation memory.",
        avoid="The sequence length must be a multiple of the tensor-parallel size.",
    )
    pipeline_schedule: str | None = option(
        None,
        switches={
            "--enable-zbh1-pipeline": "zb-h1",
            "--enable-zbh1-exact-semantics": "zb-h1",
        },
        help="Order of the work on a pipeline rank: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v or "
        "zb-auto. Default: 1f1b; interleaved if ranks hold several stages.",
        avoid="gpipe keeps the activations of all micro-batches, zb-h2 of twice as many as 1f1b.",
    )
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        at_least=1,
        help="Stages (chunks of layers) on each pipeline rank: more of them shorten the idle time of the "
        "pipeline. Default: 2 for interleaved and zb-v, else 1.",
        avoid="Each additional stage adds a transfer per micro-batch.",
    )
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None,
        at_least=1,
        help="Number of stages on each pipeline rank, given as the decoder layers of one stage: stages = "
        "layers / (pipeline size × this).",
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None,
        at_least=1,
        unit="micro-batches",
        help="interleaved: the smallest number of micro-batches that a rank runs through one of its stages "
        "before it continues with the next. Default: the pipeline size.",
        avoid="One or two more hide the transfers between stages, but keep that many more activations for "
        "each stage of a rank except one. With fewer than the pipeline size, ranks would wait.",
    )
    pipeline_layout: str | None = option(
        None,
        flags=["--pipeline-model-parallel-layout"],
        help="Decoder layers of each pipeline stage, such as 3,2,3; or one letter per layer, such as "
        "Et*3|tt|t*3mL (E embedding, t decoder layer, m depth of --mtp-num-layers, on the stage of L, norm "
        "and head). With several stages on a rank, one entry per stage. Default: see --pipeline-cut.",
    )
    decoder_first_pipeline_num_layers: int | None = option(
        None,
        at_least=1,
        help="Decoder layers of the first pipeline rank; the others share the rest evenly.",
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None,
        at_least=1,
        help="Decoder layers of the last pipeline rank; the others share the rest evenly.",
    )
    account_for_embedding_in_pipeline_split: bool = option(
        False,
        help="Count the embedding as a layer when layers are divided among the stages.",
        avoid="--pipeline-cut flops counts it by its cost.",
    )
    account_for_loss_in_pipeline_split: bool = option(
        False,
        help="Count the output head as a layer when layers are divided among the stages.",
        avoid="--pipeline-cut flops counts it by its cost.",
    )
    pipeline_cut: str = option(
        "flops",
        choices=("flops", "parameters", "uniform", "measured"),
        json="pipeline.partition",
        values={"best": "flops"},
        help="How layers are assigned to stages: the cost of the most expensive stage is minimal. The cost "
        "of a layer is its FLOPs, its parameters, 1 for each decoder layer (uniform), or its time "
        "measured at startup (measured, which also measures transfers for zb-auto).",
        avoid="measured takes seconds at startup, and the assignment depends on the machine.",
    )
    pipeline_costs_path: str | None = option(
        None,
        per_host=True,
        needs=need("parallel.pipeline_cut", "measured"),
        help="File of measured times (--pipeline-cut measured): read if it matches this run, else written.",
    )
    pipeline_memory_limit: int | None = option(
        None,
        at_least=1,
        unit="micro-batches",
        help="Number of micro-batches whose activations zb-auto may keep on a rank. Default: the pipeline "
        "size, as many as 1f1b keeps on the first rank.",
    )
    rank_order: str = option(
        "tp-cp-ep-dp-pp",
        switches={"--use-tp-pp-dp-mapping": "tp-cp-ep-pp-dp"},
        help="Mesh axes, from the one that varies fastest with the rank to the slowest.",
        avoid="The default keeps tensor-parallel ranks on one node.",
    )
    distributed_timeout_minutes: int = option(
        10,
        at_least=1,
        unit="minutes",
        help="Longest wait for another rank before it is reported as lost.",
    )
    high_priority_stream_groups: tuple[str, ...] = option(
        ("all",),
        choices=("all", "none", *COMM_GROUPS),
        values=GROUP_NAMES,
        help="Groups of ranks whose transfers between GPUs go before computations that wait for a "
        "multiprocessor. Groups over different axes with the same ranks are one group.",
        avoid="Other groups leave more of the GPU to computations while their messages are under way.",
    )
    nccl_max_ctas: tuple[str, ...] = option(
        (),
        example="pp=2 dp-cp=16",
        unit="group=number",
        help="Most thread blocks of a GPU, each on a multiprocessor, that a transfer of a group may occupy. "
        "Default: NCCL's choice.",
        avoid="Few blocks do not use the bandwidth of fast links.",
    )

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: the world size is a multiple of it."""
        tp = self.tensor_model_parallel_size
        pp = self.pipeline_model_parallel_size
        return tp * pp * self.context_parallel_size


@dataclass(frozen=True)
class ZeroConfig:
    """Training state that data-parallel ranks split instead of replicating it."""

    stage: int = option(
        0,
        choices=(0, 1, 2, 3),
        flag="--zero-stage",
        flags=["--data-parallel-sharding-strategy"],
        switches={"--use-distributed-optimizer": 1, "--use-torch-fsdp2": 3},
        json="zero_optimization.stage",
        values={"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3},
        help="0: nothing is split; 1: optimizer state; 2: also gradients; 3: also weights.",
        avoid="At data-parallel size 1 there is nothing to split. Stage 3 communicates 1.5 times as much as "
        "the others: use it if the weights do not fit.",
    )
    zero_accumulate: str = option(
        "sharded",
        choices=("sharded", "full"),
        needs=need("zero.stage", 2, 3),
        help="How gradients of several micro-batches accumulate (stages 2 and 3). sharded: each micro-batch "
        "is reduced into the rank's shard; full: whole gradients are kept and reduced once per step.",
        avoid="full communicates less, but every rank holds all gradients during a step.",
    )
    param_persistence_threshold: int | None = option(
        None,
        at_least=0,
        flag="--stage3-param-persistence-threshold",
        json="zero_optimization.stage3_param_persistence_threshold",
        unit="elements",
        needs=need("zero.stage", 3),
        help="Parameters with fewer elements stay whole on every rank (stage 3). Default: the smallest "
        "parameters, together a thousandth of all.",
    )
    prefetch_bucket_size: int | None = option(
        None,
        at_least=0,
        flag="--stage3-prefetch-bucket-size",
        json="zero_optimization.stage3_prefetch_bucket_size",
        unit="elements",
        needs=need("zero.stage", 3),
        help="Elements that are gathered ahead of the current layer (stage 3). Default: one layer.",
        avoid="0 gathers each layer when it is needed, and waits for it.",
    )
    zero_hpz_partition_size: int = option(
        1,
        at_least=1,
        json="zero_optimization.zero_hpz_partition_size",
        unit="ranks",
        needs=need("zero.stage", 3),
        help="Weights are split over groups of this many consecutive data-parallel ranks, such as those of "
        "one node, so that layers are gathered inside a group (stage 3). Gradients and optimizer state "
        "are split over all ranks. 1: off.",
        avoid="A rank's share of the weights is larger by the number of such groups.",
    )
    zero_quantized_weights: bool = option(
        False,
        json="zero_optimization.zero_quantized_weights",
        needs=need("zero.stage", 3),
        help="Gather the weights of layers as 8-bit integers with a scale for each block (stage 3, qwZ of "
        "ZeRO++): half the bytes of 16 bits. All ranks compute with the rounded weights; master weights "
        "and checkpoints are not rounded.",
        avoid="It changes the numbers. Use it if gathers between nodes limit the speed, with "
        "--zero-hpz-partition-size.",
    )
    zero_quantized_gradients: bool = option(
        False,
        json="zero_optimization.zero_quantized_gradients",
        needs=need("zero.stage", 2, 3),
        help="Sum gradients by all-to-alls of integers with a scale for each block (stages 2 and 3, qgZ of "
        "ZeRO++): with 8 bits inside the groups of --zero-hpz-partition-size, then with 4 bits between "
        "them, a quarter of the bytes of 16 bits. Without groups, once, with 4 bits.",
        avoid="It changes the numbers; compare the loss with a run without it.",
    )
    zero_quantization_block: int = option(
        256,
        choices=(64, 128, 256, 512, 1024, 2048),
        unit="elements",
        needs=need("zero.zero_quantized_weights")
        | need("zero.zero_quantized_gradients"),
        help="Elements that share a scale, with --zero-quantized-weights and --zero-quantized-gradients. "
        "Parameters and shards are padded to a multiple of it.",
        avoid="Shorter blocks are more precise, but a scale has 4 bytes.",
    )
    zero3_pin_stage: str = option(
        "off",
        choices=("off", "on", "auto"),
        alone="on",
        switches={"--no-zero3-pin-stage": "off"},
        values={
            "true": "on",
            "false": "off",
            "yes": "on",
            "no": "off",
            "1": "on",
            "0": "off",
        },
        needs=need("zero.stage", 3),
        help="Gather the weights of a pipeline stage once per step, not once per layer, micro-batch and "
        "direction (stage 3). auto: if they fit into the memory of every rank with training state "
        "and activations. The flag without a value means on.",
        avoid="All weights of the stage then stay gathered during the step.",
    )
    reduce_bucket_size: int | None = option(
        None,
        at_least=1,
        flags=["--ddp-bucket-size"],
        json="zero_optimization.reduce_bucket_size",
        unit="elements",
        help="Gradients are reduced in buckets of about this many elements. Default: an eighth of the "
        "rank's parameters, between 1 and 40 million, or 1 million for each data-parallel rank if that is more.",
        avoid="Smaller buckets overlap more with the backward pass, but each reduction has a latency.",
    )
    allgather_bucket_size: int | None = option(
        None,
        at_least=1,
        json="zero_optimization.allgather_bucket_size",
        unit="elements",
        help="Updated weights are gathered in buckets of about this many elements. They share their buckets "
        "with the reduction, so the smaller of the two sizes applies to both. Default: "
        "--reduce-bucket-size.",
    )
    overlap_comm: bool | None = option(
        None,
        switches={"--overlap-grad-reduce": True, "--no-overlap-grad-reduce": False},
        json="zero_optimization.overlap_comm",
        help="Reduce a bucket of gradients during the backward pass. Default: on with more than one "
        "data-parallel rank.",
        avoid="Turn it off only for debugging.",
    )

    communication_data_type: str | None = option(
        None,
        choices=("fp32", "bf16", "fp16"),
        json="communication_data_type",
        help="Dtype in which gradients are summed over the data-parallel ranks. Default: "
        "--main-grads-dtype, in which they accumulate.",
        avoid="16 bits halve the traffic of fp32, but each sum is rounded: bf16 keeps about 3 digits.",
    )
    gradient_predivide_factor: float = option(
        1.0,
        above=0,
        json="gradient_predivide_factor",
        help="Gradients are divided by this before they are summed in fp16 and multiplied by it afterwards, "
        "so that the sum stays in the range of fp16. Use a power of two.",
        avoid="The smallest gradients are lost. Use it only if steps are skipped at a loss scale that a "
        "single rank could use.",
    )
    prescale_gradients: bool = option(
        False,
        json="prescale_gradients",
        help="Like --gradient-predivide-factor with the number of data-parallel ranks.",
    )

    offload_optimizer: str = option(
        "none",
        choices=("none", "cpu", "nvme"),
        switches={"--optimizer-cpu-offload": "cpu", "--cpu-optimizer": "cpu"},
        json="zero_optimization.offload_optimizer.device",
        needs=need("zero.stage", 1, 2, 3),
        help="Where master weights and optimizer state are kept (stages 1 to 3): on the device (none), in "
        "host memory, or on a disk. Offloaded state is updated by the host's CPU.",
        avoid="Each step moves gradients and weights, or the state, between device, host and disk.",
    )
    offload_optimizer_ratio: float = option(
        1.0,
        above=0,
        at_most=1,
        flags=["--optimizer-offload-fraction"],
        json="zero_optimization.offload_optimizer.ratio",
        needs=need("zero.offload_optimizer", "cpu", "nvme"),
        help="Share of the optimizer state that is offloaded; the device keeps and updates the rest.",
    )
    offload_param: str = option(
        "none",
        choices=("none", "cpu", "nvme"),
        json="zero_optimization.offload_param.device",
        needs=need("zero.stage", 3),
        help="Where each rank's shard of the weights is kept (stage 3). Layers are copied to the device "
        "when they are used.",
    )
    offload_nvme_path: str | None = option(
        None,
        per_host=True,
        flags=["--nvme-path"],
        json="zero_optimization.offload_optimizer.nvme_path",
        needs=OFFLOADED_TO_DISK,
        help="Folder on a local disk for the scratch file of offloaded state, made if it is missing. The file is "
        "deleted however the run ends.",
    )
    offload_param_nvme_path: str | None = option(
        None,
        per_host=True,
        json="zero_optimization.offload_param.nvme_path",
        needs=OFFLOADED_TO_DISK,
        help="Folder for the scratch file of offloaded weights. Default: --offload-nvme-path.",
    )
    sub_group_size: int = option(
        4 * 2**20,
        at_least=2048,
        json="zero_optimization.sub_group_size",
        unit="elements",
        needs=need("zero.offload_optimizer", "cpu", "nvme"),
        help="Offloaded state is processed in groups of about this many elements.",
        avoid="With a disk, three groups are in memory at a time, at 12 to 16 bytes per element.",
    )
    nvme_io: str = option(
        "auto",
        per_host=True,
        choices=("auto", "io_uring", "threads"),
        needs=OFFLOADED_TO_DISK,
        help="How the scratch file is read and written. auto: io_uring if the system allows it, else "
        "threads.",
    )
    nvme_block_size: int = option(
        2**20,
        per_host=True,
        at_least=4096,
        json="aio.block_size",
        unit="bytes",
        needs=OFFLOADED_TO_DISK,
        help="Size of the blocks that are read and written.",
    )
    nvme_queue_depth: int = option(
        32,
        per_host=True,
        at_least=1,
        json="aio.queue_depth",
        needs=OFFLOADED_TO_DISK,
        help="Blocks in flight at a time (--nvme-io io_uring).",
    )
    nvme_threads: int = option(
        4,
        per_host=True,
        at_least=1,
        json="aio.intra_op_parallelism",
        needs=OFFLOADED_TO_DISK,
        help="Number of threads that read and write (--nvme-io threads).",
    )

    @property
    def sent_dtype(self) -> str | None:
        """Dtype in which gradients are reduced, as torch names it; None: as they accumulate."""
        return (
            DTYPE_NAMES[self.communication_data_type]
            if self.communication_data_type
            else None
        )

    @property
    def sent_divisor(self) -> float | None:
        """Divisor of gradients while they are summed; None: the number of ranks."""
        return None if self.prescale_gradients else self.gradient_predivide_factor

    @property
    def param_nvme_path(self) -> str | None:
        """Folder for the scratch file of offloaded weights."""
        return self.offload_param_nvme_path or self.offload_nvme_path

    def disk_folders(self) -> dict[str, str | None]:
        """Return the path of each option that offloads to a disk → its folder; None if none is given."""
        folders = {
            "zero.offload_optimizer": self.offload_nvme_path,
            "zero.offload_param": self.param_nvme_path,
        }
        return {
            path: folder
            for path, folder in folders.items()
            if getattr(self, path.partition(".")[2]) == "nvme"
        }


# Options that state the layers of a stage, and options that count something else as a layer.
COUNTS = (
    "parallel.decoder_first_pipeline_num_layers",
    "parallel.decoder_last_pipeline_num_layers",
)


ACCOUNTS = (
    "parallel.account_for_embedding_in_pipeline_split",
    "parallel.account_for_loss_in_pipeline_split",
)
