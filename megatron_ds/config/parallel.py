"""`ParallelConfig` and `ZeroConfig`: how the ranks share the model, and how data-parallel ranks share the training state."""

from dataclasses import dataclass

from .option import DTYPE_NAMES, option


@dataclass(frozen=True)
class ParallelConfig:
    """Sizes of the mesh axes. The data-parallel size is what the others leave over."""

    tensor_model_parallel_size: int = option(
        1, at_least=1, flags=["--model-parallel-size"], help="Ranks that split every layer between them.",
        avoid="Beyond one node the all-reduces of each layer become the bottleneck.")
    pipeline_model_parallel_size: int = option(
        1, at_least=1, json="pipeline.stages", help="Ranks that each hold some of the layers.",
        avoid="With fewer micro-batches than about four times this many, ranks wait for one another.")
    context_parallel_size: int = option(1, at_least=1, help="Ranks that split the sequence. Only 1 for now.")
    expert_model_parallel_size: int = option(1, at_least=1, flags=["--moe-expert-parallel-size"],
                                             help="Ranks that share the experts between them. Only 1 for now.")
    sequence_parallel: bool = option(
        False, help="Split norms and dropout along the sequence inside a tensor-parallel group: saves activation memory.",
        avoid="The sequence length must be a multiple of the tensor-parallel size.")
    pipeline_schedule: str | None = option(
        None, switches={"--enable-zbh1-pipeline": "zb-h1", "--enable-zbh1-exact-semantics": "zb-h1"},
        help="In which order a pipeline rank works: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v or zb-auto. Default: 1f1b; "
        "interleaved where ranks hold several stages.",
        avoid="gpipe keeps the activations of all micro-batches alive, zb-h2 of twice as many as 1f1b.")
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, at_least=1, help="Stages (chunks of layers) on each pipeline rank: with more of them the pipeline fills faster. "
        "Default: 2 for interleaved and zb-v, else 1.", avoid="Each more is a transfer more for every micro-batch.")
    num_layers_per_virtual_pipeline_stage: int | None = option(
        None, at_least=1, help="The same, said by the decoder layers of one stage: layers / pipeline size / this.")
    microbatch_group_size_per_virtual_pipeline_stage: int | None = option(
        None, at_least=1, unit="micro-batches", help="interleaved: how many micro-batches, at least, a rank takes through one "
        "of its stages before it turns to the next. Default: as many as there are pipeline ranks.",
        avoid="One or two more hide the transfers between stages, and keep that many more activations alive for each stage "
        "of a rank but one. Fewer than the pipeline size would let ranks wait.")
    pipeline_layout: str | None = option(
        None, flags=["--pipeline-model-parallel-layout"], help="Decoder layers of each pipeline stage, such as 3,2,3; or a "
        "letter a layer, such as Et*3|tt|t*3L (E embedding, t decoder layer, L norm and head). With several stages on a rank "
        "as many as there are stages. Default: see --pipeline-cut.")
    pipeline_cut: str = option(
        "flops", choices=("flops", "parameters", "uniform", "measured"), json="pipeline.partition", values={"best": "flops"},
        help="The layers are cut into stages so that the costliest stage is cheapest, exactly. A layer costs its arithmetic, "
        "its parameters, one for each decoder layer (uniform), or the time that it takes here when the run starts "
        "(measured; with it the transfers, which zb-auto looks at).",
        avoid="measured takes seconds at the start, and another machine may be cut otherwise.")
    pipeline_costs_path: str | None = option(
        None, help="File of measured times (--pipeline-cut measured): read if it fits this run, else written.")
    pipeline_memory_limit: int | None = option(
        None, at_least=1, unit="micro-batches", help="Activations that zb-auto may keep alive on a rank. Default: as many as "
        "1f1b keeps on the first, one a pipeline rank.")
    rank_order: str = option(
        "tp-cp-ep-dp-pp", switches={"--use-tp-pp-dp-mapping": "tp-cp-ep-pp-dp"},
        help="Mesh axes from the fastest to the slowest varying with the rank.",
        avoid="The default keeps tensor-parallel ranks on one node.")
    distributed_timeout_minutes: int = option(10, at_least=1, unit="minutes",
                                              help="Longest wait for another rank before it counts as lost.")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model: the world is a multiple of it."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass(frozen=True)
class ZeroConfig:
    """What data-parallel ranks split between them instead of each holding all of it."""

    stage: int = option(
        0, choices=(0, 1, 2, 3), flag="--zero-stage", switches={"--use-distributed-optimizer": 1},
        json="zero_optimization.stage", help="0: nothing is split; 1: optimizer state; 2: also gradients; 3: also weights.",
        avoid="At data-parallel size 1 there is nothing to split. 3 sends half as much again as the others: choose it when "
        "the weights do not fit.")
    zero_accumulate: str = option(
        "sharded", choices=("sharded", "full"), help="How gradients of several micro-batches add up (stages 2 and 3). "
        "sharded: each micro-batch is reduced into the rank's shard; full: whole gradients are kept and reduced once a step.",
        avoid="full holds all gradients on every rank while it adds up: less memory is saved, less is sent.")
    param_persistence_threshold: int | None = option(
        None, at_least=0, flag="--stage3-param-persistence-threshold",
        json="zero_optimization.stage3_param_persistence_threshold", unit="elements",
        help="Parameters with fewer elements stay whole on every rank (stage 3). Default: the smallest, a thousandth of all.")
    prefetch_bucket_size: int | None = option(
        None, at_least=0, flag="--stage3-prefetch-bucket-size", json="zero_optimization.stage3_prefetch_bucket_size",
        unit="elements", help="So many elements are gathered ahead of the layer at work (stage 3). Default: one layer.",
        avoid="0 gathers each layer when it is needed, and waits for it.")
    zero_hpz_partition_size: int = option(
        1, at_least=1, json="zero_optimization.zero_hpz_partition_size", unit="ranks", help="Weights are split over groups of "
        "so many consecutive data-parallel ranks, as of one node, not over all, so that gathering layers stays inside "
        "(stage 3). Gradients and optimizer state are split over all. 1: off.",
        avoid="Each rank keeps as many more weights as there are such groups.")
    zero3_pin_stage: str = option(
        "off", choices=("off", "on", "auto"), alone="on", switches={"--no-zero3-pin-stage": "off"},
        values={"true": "on", "false": "off", "yes": "on", "no": "off", "1": "on", "0": "off"},
        help="Gather the weights of a pipeline stage once a step, not once per layer, micro-batch and direction (stage 3). "
        "auto: where they fit on every rank, next to state and activations. The flag alone means on.",
        avoid="All weights of the stage are then whole during the step.")
    reduce_bucket_size: int | None = option(
        None, at_least=1, flags=["--ddp-bucket-size"], json="zero_optimization.reduce_bucket_size", unit="elements",
        help="Gradients are reduced in buckets of about this many elements. Default: an eighth of the rank's parameters, "
        "between 1 and 40 million.",
        avoid="Smaller overlaps more with backward but each reduction costs a latency.")
    allgather_bucket_size: int | None = option(
        None, at_least=1, json="zero_optimization.allgather_bucket_size", unit="elements",
        help="Updated weights are gathered in buckets of about this many elements. The buckets are those of the reduction, "
        "so the smaller of the two sizes holds for both. Default: as reduced.")
    overlap_comm: bool | None = option(
        None, switches={"--overlap-grad-reduce": True, "--no-overlap-grad-reduce": False},
        json="zero_optimization.overlap_comm", help="Reduce a bucket while backward still runs. Default: when there is "
        "anybody to reduce with.", avoid="Off is only for finding faults.")

    communication_data_type: str | None = option(
        None, choices=("fp32", "bf16", "fp16"), json="communication_data_type", help="Gradients are cast to it while they "
        "are summed over the data-parallel ranks. Default: --main-grads-dtype, in which they accumulate.",
        avoid="16 bits send half as much as fp32, but each sum is rounded to them; bf16 keeps 3 digits.")
    gradient_predivide_factor: float = option(
        1.0, above=0, json="gradient_predivide_factor", help="Gradients are divided by it before they travel in fp16 and "
        "multiplied with it after: their sum stays inside the range of fp16. Take a power of two.",
        avoid="The smallest gradients are lost to it: first see whether steps are skipped at a loss scale that one rank "
        "alone could take.")
    prescale_gradients: bool = option(
        False, json="prescale_gradients", help="The same, divided by the number of data-parallel ranks.")

    offload_optimizer: str = option(
        "none", choices=("none", "cpu", "nvme"), switches={"--optimizer-cpu-offload": "cpu", "--cpu-optimizer": "cpu"},
        json="zero_optimization.offload_optimizer.device", help="Where masters and optimizer state live between updates "
        "(stages 1 to 3): on the device, in the host's memory, or on a disk. Off the device, the host's CPU updates them.",
        avoid="Each step moves the state, or gradients and weights, between the places.")
    offload_optimizer_ratio: float = option(
        1.0, above=0, at_most=1, flags=["--optimizer-offload-fraction"], json="zero_optimization.offload_optimizer.ratio",
        help="The part of the optimizer state that is offloaded; the device keeps and updates the rest.")
    offload_param: str = option(
        "none", choices=("none", "cpu", "nvme"), json="zero_optimization.offload_param.device",
        help="Where each rank's share of the weights lives (stage 3); layers come to the device for their work.")
    offload_nvme_path: str | None = option(
        None, flags=["--nvme-path"], json="zero_optimization.offload_optimizer.nvme_path",
        help="Folder on a local disk for what is offloaded to nvme. Its scratch file is gone when the run ends, however.")
    offload_param_nvme_path: str | None = option(
        None, json="zero_optimization.offload_param.nvme_path",
        help="The same for weights. Default: as --offload-nvme-path.")
    sub_group_size: int = option(
        4 * 2**20, at_least=2048, json="zero_optimization.sub_group_size", unit="elements",
        help="Offloaded state comes to the host in groups of about this many elements.",
        avoid="From a disk, three groups are in memory at a time, of 12 to 16 bytes an element.")
    nvme_io: str = option(
        "auto", choices=("auto", "io_uring", "threads"), help="How files are read and written. auto: io_uring where the "
        "system allows it, else threads.")
    nvme_block_size: int = option(2**20, at_least=4096, json="aio.block_size", unit="bytes",
                                  help="Reads and writes are cut into blocks of this size.")
    nvme_queue_depth: int = option(32, at_least=1, json="aio.queue_depth", help="Blocks under way at a time (io_uring).")
    nvme_threads: int = option(4, at_least=1, json="aio.intra_op_parallelism", help="Threads that read and write (threads).")

    @property
    def sent_dtype(self) -> str | None:
        return DTYPE_NAMES[self.communication_data_type] if self.communication_data_type else None

    @property
    def sent_divisor(self) -> float | None:
        """None: the number of ranks."""
        return None if self.prescale_gradients else self.gradient_predivide_factor

    @property
    def param_nvme_path(self) -> str | None:
        return self.offload_param_nvme_path or self.offload_nvme_path

    def disk_folders(self) -> dict[str, str | None]:
        """{option that sends something to a disk: the folder}."""
        folders = {"zero.offload_optimizer": self.offload_nvme_path, "zero.offload_param": self.param_nvme_path}
        return {path: folder for path, folder in folders.items() if getattr(self, path.partition(".")[2]) == "nvme"}
