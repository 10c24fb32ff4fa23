"""Flags of Megatron and keys of DeepSpeed's JSON that have no option here: tables of flag or key → `Answer`.

A flag or key is accepted if it requests what always happens here, or if it chooses an implementation without
changing any number; startup lists it under "accepted, nothing to do". It is refused, with the reason, if the
run would otherwise differ from what it requests. A value that switches a feature off is always accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Values that mean "off". DeepSpeed replaces "auto" by the default, which is off for all refused keys.
OFF = (False, None, "auto")


@dataclass(frozen=True)
class Answer:
    """Which values of a flag or key are accepted.

    note     why an accepted value changes nothing
    refusal  why another value is refused, and what to do
    values   the accepted values; None: all
    """

    note: str = ""
    refusal: str = ""
    values: tuple[Any, ...] | None = None

    def accepts(self, value: Any) -> bool:
        """Whether the value is accepted. value: of the flag as a string, or of the key."""
        if self.values is None:
            return True
        if isinstance(value, dict):
            return _is_off(value)
        return any(type(value) is type(known) and value == known for known in self.values)


def _is_off(value: Any) -> bool:
    """Whether a value switches a feature off.

    A block does if its "enabled" does, or else if all its values do.
    """
    if isinstance(value, dict):
        return value["enabled"] in OFF if "enabled" in value else all(map(_is_off, value.values()))
    return value in OFF or value in (0, "", [])


def nothing(note: str) -> Answer:
    """An answer that accepts every value."""
    return Answer(note)


def only(*values: Any, note: str, refusal: str) -> Answer:
    """An answer that accepts these values and None and "auto"."""
    return Answer(note, refusal, (*values, None, "auto"))


def refused(reason: str) -> Answer:
    """An answer that accepts only values that mean "off"."""
    return Answer("it is off", reason, OFF)


_ONE_MODEL = nothing("there is one implementation of the model")
_KERNEL = nothing("kernels are chosen by what the device supports")
_TP_ASYNC = nothing("the tensor-parallel all-reduce always overlaps with the weight gradient")
_DDP = nothing("gradients are reduced from flat buffers; --zero-stage chooses what is sharded")
_FORMAT = nothing("checkpoints have one format, which loads at any layout")
_RATE = nothing("the learning rate always follows from the flags and from progress")
_LOGGED = nothing("always logged")
_SIGNALS = nothing("the run always saves and exits on SIGTERM, SIGUSR1 and the first Ctrl-C")
_NO_RNG = nothing("a checkpoint holds no random state: random numbers follow from --seed and their place in "
                  "the run")
_INIT = nothing("initial weights follow from --seed and each weight's name, the same on every layout")
_GC = nothing("it only tunes Python's garbage collection")
_LATER = refused("it is planned for a later version. Remove it.")
_MOE = refused("this option of layers with experts is not available. docs/flags.md lists those that are.")
_DATA = only("mmap", "infer", note="datasets are always memory-mapped .bin/.idx files",
             refusal="only memory-mapped .bin/.idx datasets can be read. Convert the corpus with "
                     "tools/preprocess_data.py, then write --data-impl mmap or remove the flag.")

FLAGS: Mapping[str, Answer] = MappingProxyType({
    "--apply-query-key-layer-scaling": nothing("attention scores are computed in fp32 and need no second "
                                               "scaling"),
    "--async-tensor-model-parallel-allreduce": _TP_ASYNC,
    "--attention-backend": _KERNEL,
    "--attention-softmax-in-fp32": nothing("the softmax of attention is always computed in fp32"),
    "--ckpt-format": _FORMAT,
    "--cross-entropy-fusion-impl": _KERNEL,
    "--cross-entropy-loss-fusion": _KERNEL,
    "--data-impl": _DATA,
    "--data-parallel-random-init": refused("every data-parallel rank starts with the same weights. Remove "
                                           "it."),
    "--dataset-impl": _DATA,
    "--DDP-impl": _DDP,
    "--ddp-backend": _DDP,
    "--deepspeed": nothing("DeepSpeed's features are always available; --deepspeed_config names the JSON"),
    "--deepspeed-activation-checkpointing": nothing("recomputation has one implementation; "
                                                    "--checkpoint-activations or --recompute-granularity "
                                                    "turns it on"),
    "--deepspeed-mpi": nothing("the launcher is recognised from the environment"),
    "--dist-ckpt-format": _FORMAT,
    "--distributed-backend": nothing("it is NCCL on CUDA devices and gloo on CPUs"),
    "--distributed-timeout": refused("write --distributed-timeout-minutes."),
    "--exit-signal": only("SIGTERM", "SIGUSR1", "SIGINT", note=_SIGNALS.note,
                          refusal="the run saves and exits on SIGTERM, SIGUSR1 and Ctrl-C only. Send one of "
                                  "these, and remove the flag."),
    "--exit-signal-handler": _SIGNALS,
    "--fim-eod-token": refused("documents end with the tokenizer's end-of-document token. Remove it."),
    "--fim-pad-token": nothing("padding never enters the model"),
    "--fp32-residual-connection": refused("residuals are added in the dtype of the weights. Remove it."),
    "--log-batch-size-to-tensorboard": _LOGGED,
    "--log-memory-to-tensorboard": refused("memory is in the log line and in metrics.jsonl, but not in "
                                           "TensorBoard. Remove it."),
    "--log-optimizer-states-to-tensorboard": _LATER,
    "--log-throughput": _LOGGED,
    "--log-timers-to-tensorboard": refused("TensorBoard gets iteration-time and batch-generator-time; other "
                                           "phases are not timed. Remove it."),
    "--log-validation-ppl-to-tensorboard": _LOGGED,
    "--log-world-size-to-tensorboard": refused("the world size is printed at startup, but not written to "
                                               "TensorBoard. Remove it."),
    "--manual-gc": _GC,
    "--manual-gc-interval": _GC,
    "--no-async-tensor-model-parallel-allreduce": _TP_ASYNC,
    "--no-bias-dropout-fusion": _KERNEL,
    "--no-bias-gelu-fusion": _KERNEL,
    "--no-bias-swiglu-fusion": _KERNEL,
    "--no-create-attention-mask-in-dataloader": nothing("attention masks are never built in the data loader"),
    "--no-gradient-accumulation-fusion": _KERNEL,
    "--no-load-rng": _NO_RNG,
    "--no-log-learnig-rate-to-tensorboard": _LOGGED,                  # Megatron's own spelling
    "--no-log-loss-scale-to-tensorboard": _LOGGED,
    "--no-masked-softmax-fusion": _KERNEL,
    "--no-mmap-bin-files": nothing("data files are always memory-mapped"),
    "--no-persist-layer-norm": _KERNEL,
    "--no-query-key-layer-scaling": nothing("attention scores have no second scaling"),
    "--no-rope-fusion": _KERNEL,
    "--no-save-rng": _NO_RNG,
    "--num-layers-per-stage": refused("write --pipeline-layout, such as 3,2,3."),
    "--overlap-param-gather": nothing("updated weights are gathered right after the step"),
    "--override-opt-param-scheduler": _RATE,
    "--pipeline-model-parallel-split-rank": refused("encoder-decoder models are not available. Remove it."),
    "--tensorboard-log-interval": refused("TensorBoard gets a point at each --log-interval. Set that "
                                          "instead, and remove this flag."),
    "--tensorboard-queue-size": nothing("TensorBoard's own buffer size is used"),
    "--transformer-impl": _ONE_MODEL,
    "--use-checkpoint-opt-param-scheduler": refused("the learning rate always follows from the flags, never "
                                                    "from the checkpoint. Give the schedule with flags, and "
                                                    "remove it."),
    "--use-cpu-initialization": _INIT,
    "--use-dist-ckpt": _FORMAT,
    "--use-flash-attn": _KERNEL,
    "--use-flash-attn-triton": _KERNEL,
    "--use-flash-attn-v2": _KERNEL,
    "--use-legacy-models": _ONE_MODEL,
    "--use-mcore-models": _ONE_MODEL,
    "--use-torch-fsdp2": refused("write --zero-stage 3."),
    "--virtual-pipeline-model-parallel-size": refused("write --num-virtual-stages-per-pipeline-rank."),
})

# Whole families of flags, by how they begin.
FAMILIES: Mapping[str, Answer] = MappingProxyType({
    "--moe-": _MOE,
    "--wandb-": refused("metrics go to the log, to TensorBoard and to --metrics-jsonl. Remove it."),
    "--fp8-": refused("fp8 is not available. Use --bf16, and remove it."),
})

_FLAT = nothing("gradients lie in flat buckets, each reduced once by the collective of its ZeRO stage")
_STAGE3 = nothing("layers are gathered in the order of the model and released after use")
_PINNED = nothing("host memory is page-locked where there is a GPU")
_BUFFERS = nothing("there are as many buffers as are read, updated and written at a time; see sub_group_size")
_OVERLAPPED = nothing("reads, updates and writes always overlap")
_FASTEST = nothing("the fastest implementation is chosen automatically")
_SLICES = nothing("with --sequence-parallel only a slice of each activation is sent")
_MONITOR = refused("metrics go to the log, to TensorBoard and to --metrics-jsonl. Remove it.")
_WRITE_16 = refused("write a bf16 or an fp16 block instead.")

# Keys of DeepSpeed's JSON. A key covers the block under it.
KEYS: Mapping[str, Answer] = MappingProxyType({
    "activation_checkpointing": refused("a training script takes --recompute-granularity full or selective; "
                                        "a module of an engine calls megatron_ds.checkpointing.checkpoint(). "
                                        "Remove it."),
    "aio.overlap_events": _OVERLAPPED,
    "aio.single_submit": nothing("blocks are submitted together"),
    "aio.use_gds": _LATER,
    "amp": _WRITE_16,
    "autotuning": _LATER,
    "bf16.check_grad_overflow": only(True, note="a step whose gradient is not finite is always skipped",
                                     refusal="a step whose gradient is not finite is always skipped. Remove "
                                             "it."),
    "bf16.immediate_grad_update": nothing("gradients are added to their buffer as soon as they are computed"),
    "comms_logger": _LATER,
    "compression_training": _LATER,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "data_efficiency.data_sampling.dynamic_batching": refused("a batch has a fixed number of samples. Remove "
                                                              "it."),
    "data_efficiency.data_sampling.num_epochs": only(
        1000, note="the length of training is --train-iters, --train-samples or --train-tokens",
        refusal="the length of training is --train-iters, --train-samples or --train-tokens. Set that, and "
                "remove it."),
    "data_efficiency.data_sampling.pin_memory": _PINNED,
    "dataloader_drop_last": nothing("a training batch is always whole"),
    "disable_allgather": _FLAT,
    "dump_state": nothing("startup prints every value that is not the default"),
    "elasticity": _LATER,
    "flops_profiler": refused("the log line has the TFLOP/s of the whole step; layers are not profiled. "
                              "Remove it."),
    "fp16.auto_cast": refused("floating-point inputs are not cast: pass them in fp16. Remove it."),
    "fp16.consecutive_hysteresis": refused("hysteresis is refilled when the scale grows. Remove it."),
    "fp16.fp16_master_weights_and_grads": refused("master weights and gradients are in fp32. Remove it."),
    "gradient_allreduce_op": only("mean", note="gradients are averaged", refusal="gradients are averaged. "
                                                                                 "Remove it."),
    "memory_breakdown": _LATER,
    "monitor_config": _MONITOR,
    "optimizer.legacy_fusion": _FASTEST,
    "optimizer.params.adam_w_mode": only(True, note="weight decay is always decoupled",
                                         refusal="weight decay is always decoupled (AdamW). Remove it."),
    "optimizer.params.amsgrad": _LATER,
    "optimizer.params.bias_correction": only(True, note="Adam always corrects its bias",
                                             refusal="Adam always corrects its bias. Remove it."),
    "optimizer.params.max_grad_norm": refused('write "gradient_clipping" at the top level.'),
    "optimizer.params.torch_adam": _FASTEST,
    "pipeline.activation_checkpoint_interval": only(0, note="it is off", refusal="write "
                                                    "--recompute-granularity full instead. Remove it."),
    "pipeline.grad_partitioned": _SLICES,
    "pipeline.pipe_partitioned": _SLICES,
    "pipeline.seed_layers": refused("initial weights follow from --seed and each weight's name. Remove it."),
    "pipeline.use_reentrant": nothing("recomputation never re-enters autograd"),
    "seq_parallel_communication_data_type": refused("activations are sent in their own dtype. Remove it."),
    "sparse_gradients": nothing("all gradients are dense"),
    "torch_autocast": _WRITE_16,
    "wall_clock_breakdown": _LATER,
    "wandb": _MONITOR,
    "zero_allow_untested_optimizer": nothing("every optimizer here works with every ZeRO stage"),
    "zero_force_ds_cpu_optimizer": nothing("every optimizer here can be offloaded"),
    "zero_optimization.allgather_partitions": _FLAT,
    "zero_optimization.contiguous_gradients": _FLAT,
    "zero_optimization.cpu_offload": refused('write "offload_optimizer": {"device": "cpu"}.'),
    "zero_optimization.cpu_offload_params": refused('write "offload_param": {"device": "cpu"}.'),
    "zero_optimization.cpu_offload_use_pin_memory": _PINNED,
    "zero_optimization.elastic_checkpoint": nothing("every checkpoint loads at any layout"),
    "zero_optimization.ignore_unused_parameters": _FLAT,
    "zero_optimization.legacy_stage1": _FLAT,
    "zero_optimization.load_from_fp32_weights": only(True, note="fp32 master weights are always loaded",
                                                     refusal="fp32 master weights are always loaded. Remove "
                                                             "it."),
    "zero_optimization.reduce_scatter": _FLAT,
    "zero_optimization.round_robin_gradients": _FLAT,
    "zero_optimization.use_multi_rank_bucket_allreduce": _FLAT,
    "zero_optimization.zero_quantized_gradients": _LATER,
    "zero_optimization.zero_quantized_weights": _LATER,
    **{f"zero_optimization.offload_{what}.{name}": answer for what, name, answer in (
        ("optimizer", "buffer_count", _BUFFERS), ("optimizer", "pin_memory", _PINNED),
        ("optimizer", "pipeline", _OVERLAPPED),
        ("optimizer", "pipeline_read", _OVERLAPPED), ("optimizer", "pipeline_write", _OVERLAPPED),
        ("optimizer", "fast_init", _OVERLAPPED), ("optimizer", "super_offload", _LATER),
        ("optimizer", "cpuadam_cores_perc", nothing("OMP_NUM_THREADS sets the number of CPU threads")),
        ("param", "buffer_count", _BUFFERS), ("param", "buffer_size", _BUFFERS),
        ("param", "pin_memory", _PINNED),
        ("param", "max_in_cpu", nothing("weights are either in host memory or on disk")))},
    **{f"zero_optimization.stage3_{name}": _STAGE3 for name in (
        "max_live_parameters", "max_reuse_distance", "model_persistence_threshold",
        "module_granularity_threshold", "use_all_reduce_for_fetch_params")},
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": nothing(
        "exported weights are always gathered"),
})


def answer_to_flag(flag: str) -> Answer | None:
    """The answer to a flag of Megatron; None if the tables do not have it."""
    of_family = (answer for start, answer in FAMILIES.items() if flag.startswith(start))
    return FLAGS.get(flag) or next(of_family, None)


def answer_to_key(key: str) -> tuple[str, Answer] | None:
    """(key of the table, its answer) for a key or a key of a block under it; None if the table does not have
    it.
    """
    for known, answer in KEYS.items():
        if key == known or key.startswith(known + "."):
            return known, answer
    return None
