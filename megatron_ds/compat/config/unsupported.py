"""Flags of Megatron and keys of DeepSpeed's JSON that have no option here: tables of flag or key → `Answer`.

A flag or key is accepted if it requests what always happens here, or if it chooses an implementation without
changing any number; startup lists it under "accepted, nothing to do". It is refused, with the reason, if the
run would otherwise differ from what it requests. A value that switches a feature off is always accepted.
"""

from collections.abc import Mapping
from typing import Any

from ...config.sources.answers import Answer, asks_for_nothing, table
from .dialects import FORK_FLAGS
from .unsupported_megatron import MEGATRON_FLAGS
from .unsupported_moe import MOE_FLAGS
from .unsupported_runtime import RUNTIME_FLAGS

FLAGS: Mapping[str, Answer] = {
    **FORK_FLAGS,
    **RUNTIME_FLAGS,
    **MOE_FLAGS,
    **MEGATRON_FLAGS,
    **table(
        accepted={
            "attention scores are computed in fp32 and need no second scaling": "--apply-query-key-layer-scaling",
            "the tensor-parallel all-reduce always overlaps with the weight gradient": "--async-tensor-model-parallel-allreduce --no-async-tensor-model-parallel-allreduce",
            "kernels are chosen by what the device supports": "--attention-backend --cross-entropy-fusion-impl --cross-entropy-loss-fusion "
            "--no-bias-dropout-fusion --no-bias-swiglu-fusion "
            "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
            "--no-rope-fusion --use-flash-attn --use-flash-attn-triton --use-flash-attn-v2",
            "the softmax of attention is always computed in fp32": "--attention-softmax-in-fp32",
            "checkpoints have one format, which loads at any layout": "--ckpt-format --dist-ckpt-format --use-dist-ckpt",
            "gradients are reduced from flat buffers; --zero-stage chooses what is sharded": "--DDP-impl --ddp-backend",
            "DeepSpeed's features are always available; --deepspeed_config names the JSON": "--deepspeed",
            "the launcher is recognised from the environment": "--deepspeed-mpi",
            "it is NCCL on CUDA devices and gloo on CPUs": "--distributed-backend",
            "the run always saves and exits on SIGTERM, SIGUSR1 and the first Ctrl-C": "--exit-signal-handler",
            "padding never enters the model": "--fim-pad-token",
            "always logged":  # learnig: Megatron's own spelling
            "--log-batch-size-to-tensorboard --log-throughput --log-validation-ppl-to-tensorboard "
            "--no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard",
            "it only tunes Python's garbage collection": "--manual-gc --manual-gc-interval",
            "attention masks are never built in the data loader": "--no-create-attention-mask-in-dataloader",
            "a checkpoint holds no random state: random numbers follow from --seed and their place in the run": "--no-load-rng --no-save-rng",
            "data files are always memory-mapped": "--no-mmap-bin-files",
            "attention scores have no second scaling": "--no-query-key-layer-scaling",
            "updated weights are gathered right after the step": "--overlap-param-gather",
            "the learning rate always follows from the flags and from progress": "--override-opt-param-scheduler",
            "TensorBoard's own buffer size is used": "--tensorboard-queue-size",
            "TensorBoard gets a point at each --log-interval": "--tensorboard-log-interval",
            "there is one implementation of the model": "--transformer-impl --use-legacy-models --use-mcore-models",
            "initial weights follow from --seed and each weight's name, the same on every layout": "--use-cpu-initialization",
        },
        refused={
            "every data-parallel rank starts with the same weights. Remove it.": "--data-parallel-random-init",
            "write --distributed-timeout-minutes.": "--distributed-timeout",
            "documents end with the tokenizer's end-of-document token. Remove it.": "--fim-eod-token",
            "residuals are added in the dtype of the weights. Remove it.": "--fp32-residual-connection",
            "write --pipeline-layout, such as 3,2,3.": "--num-layers-per-stage",
            "encoder-decoder models are not available. Remove it.": "--pipeline-model-parallel-split-rank",
            "write --num-virtual-stages-per-pipeline-rank.": "--virtual-pipeline-model-parallel-size",
        },
        only={
            "--data-impl": Answer(
                "datasets are always memory-mapped .bin/.idx files",
                "only memory-mapped .bin/.idx datasets can be read. Convert the corpus with "
                "megatron-ds preprocess, then write --data-impl mmap or remove the "
                "flag.",
                ("mmap", "infer", None, "auto"),
            ),
            "--dataset-impl": Answer(
                "datasets are always memory-mapped .bin/.idx files",
                "only memory-mapped .bin/.idx datasets can be read. Convert the corpus with "
                "megatron-ds preprocess, then write --data-impl mmap or remove the "
                "flag.",
                ("mmap", "infer", None, "auto"),
            ),
            "--exit-signal": Answer(
                "the run always saves and exits on SIGTERM, SIGUSR1 and the first Ctrl-C",
                "the run saves and exits on SIGTERM, SIGUSR1 and Ctrl-C only. Send one of these, and remove the "
                "flag.",
                ("SIGTERM", "SIGUSR1", "SIGINT", None, "auto"),
            ),
        },
    ),
}

# Whole families of flags, by how they begin.
FAMILIES = table(
    {},
    {
        "metrics go to the log, to TensorBoard, to W&B and to --metrics-jsonl. Remove it.": "--wandb-",
        "fp8 is not available. Use --bf16, and remove it.": "--fp8-",
    },
    {},
)

# Keys of DeepSpeed's JSON. A key covers the block under it.
KEYS = table(
    accepted={
        "reads, updates and writes always overlap": "aio.overlap_events zero_optimization.offload_optimizer.pipeline "
        "zero_optimization.offload_optimizer.pipeline_read "
        "zero_optimization.offload_optimizer.pipeline_write "
        "zero_optimization.offload_optimizer.fast_init",
        "blocks are submitted together": "aio.single_submit",
        "it does not turn recomputation on (--recompute-granularity does), and how recomputed layers keep "
        "their input changes no number": "activation_checkpointing.contiguous_memory_optimization "
        "activation_checkpointing.number_checkpoints "
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "it is known how the layers of a model are split": "tensor_parallel.preset_model",
        "the tensor-parallel all-reduce always overlaps with the weight gradient": "tensor_parallel.tp_overlap_comm",
        "torch.compile is not used; it would change no number": "compile",
        "DeepSpeed has no such key: CUDA_VISIBLE_DEVICES is a variable of the environment": "cuda_visible_devices",
        "gradients are added to their buffer as soon as they are computed": "bf16.immediate_grad_update",
        "host memory is page-locked where there is a GPU": "data_efficiency.data_sampling.pin_memory zero_optimization.cpu_offload_use_pin_memory "
        "zero_optimization.offload_optimizer.pin_memory zero_optimization.offload_param.pin_memory",
        "a training batch is always whole": "dataloader_drop_last",
        "they are of the search that DeepSpeed's launcher makes with --autotuning; a run measures its steps, "
        "writes the result and ends": "autotuning.arg_mappings autotuning.exps_dir autotuning.fast autotuning.max_train_batch_size "
        "autotuning.max_train_micro_batch_size_per_gpu autotuning.metric autotuning.min_train_batch_size "
        "autotuning.model_info "
        "autotuning.min_train_micro_batch_size_per_gpu autotuning.model_info_path autotuning.mp_size "
        "autotuning.num_tuning_micro_batch_sizes autotuning.overwrite autotuning.results_dir "
        "autotuning.tuner_early_stopping autotuning.tuner_num_trials autotuning.tuner_type",
        "the table of the profile has the layers of the model": "flops_profiler.module_depth "
        "flops_profiler.top_modules",
        "FLOPs of recomputation follow from --recompute-granularity": "flops_profiler.recompute_fwd_factor",
        "gradients lie in flat buckets, each reduced once by the collective of its ZeRO stage": "disable_allgather zero_optimization.allgather_partitions zero_optimization.contiguous_gradients "
        "zero_optimization.legacy_stage1 "
        "zero_optimization.reduce_scatter zero_optimization.round_robin_gradients "
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "an engine reads it; ranks of a training script use the same layers and parameters": "zero_optimization.ignore_unused_parameters zero_optimization.leaf_module",
        "startup prints every value that is not the default": "dump_state",
        "recomputation is not timed by itself": "activation_checkpointing.profile",
        "memory is in the log": "memory_breakdown",
        "a row is of an operation, a group and a size; torch.profiler has the calling functions": "comms_logger.debug",
        "metrics go to the log, to TensorBoard, to CSV files, to --metrics-jsonl and to services": "monitor_config",
        "--log-interval sets how often values are logged; an engine logs each update": "comet.samples_log_interval",
        "a run has one experiment, which continues when it resumes": "comet.experiment_key comet.mode",
        "it is a setting of NVIDIA's apex, which is not used": "fp16.opt_level",
        "it is a setting of fairseq, which DeepSpeed has never read": "fp16.fp16_scale_tolerance",
        "gradients are reduced by hooks, and the order of layers does not change": "zero_optimization.grad_hooks zero_optimization.log_trace_cache_warnings",
        "the norm of the gradient is always computed": "zero_optimization.compute_grad_norm",
        "weights are gathered by the ranks of one group, which changes no number": "zero_optimization.mics_hierarchical_params_gather",
        "the place of a parameter in a flat buffer changes no number": "zero_optimization.parameter_alignment",
        "the functions of a module stay as they are; its weights are gathered by hooks": "zero_optimization.memory_efficient_linear zero_optimization.override_module_apply",
        "it only searches for mistakes in the program that trains": "zero_optimization.enable_sanity_checks",
        "it only tunes Python's garbage collection": "disable_python_gc",
        'logging.getLogger("megatron_ds").setLevel sets the level of the lines': "log_level",
        "throughput is always measured, without waiting for the device": "timers",
        "the vocabulary is that of the model": "vocabulary_size",
        "kernels are launched one by one; graphs would change no number": "graph_harvesting",
        "neighbouring ranks divide the experts; the order of ranks changes which network is used, not what is "
        "computed": "use_data_before_expert_parallelism",
        "all ranks save into one folder, and each checkpoint loads at any layout": "checkpoint.checkpoint_serialization "
        "checkpoint.load_universal checkpoint.parallel_write checkpoint.tag_validation checkpoint.writer",
        "batch sizes are those of the file, and a checkpoint loads on any number of ranks": "elasticity",
        "the fastest implementation is chosen automatically": "optimizer.legacy_fusion optimizer.params.torch_adam",
        "momentum stays where --offload-optimizer keeps state": "zero_optimization.save_muon_momentum_buffer_in_memory",
        "both ways to compute the iterations have the same result, but for rounding": "optimizer.params.ns_method",
        "with --sequence-parallel only a slice of each activation is sent": "pipeline.grad_partitioned pipeline.pipe_partitioned",
        "signs are sent by the collectives of the run's groups": "optimizer.params.comm_backend_name optimizer.params.cuda_aware",
        "recomputation never re-enters autograd": "pipeline.use_reentrant",
        "all gradients are dense": "sparse_gradients",
        "an optimizer that does not work with a ZeRO stage is refused": "zero_allow_untested_optimizer",
        "offloaded state is updated by the optimizers of this package": "zero_force_ds_cpu_optimizer",
        "every checkpoint loads at any layout": "zero_optimization.elastic_checkpoint zero_optimization.pipeline_loading_checkpoint",
        "there are as many buffers as are read, updated and written at a time; see sub_group_size": "zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_param.buffer_count "
        "zero_optimization.offload_param.buffer_size",
        "OMP_NUM_THREADS sets the number of CPU threads": "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        "weights are either in host memory or on disk": "zero_optimization.offload_param.max_in_cpu",
        "layers are gathered in the order of the model and released after use": "zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance "
        "zero_optimization.stage3_allgather_sequential zero_optimization.stage3_model_persistence_threshold "
        "zero_optimization.stage3_module_granularity_threshold "
        "zero_optimization.stage3_use_all_reduce_for_fetch_params",
        "exported weights are always gathered": "zero_optimization.gather_16bit_weights_on_model_save "
        "zero_optimization.stage3_gather_16bit_weights_on_model_save "
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    },
    refused={
        "it is planned for a later version. Remove it.": "compression_training eigenvalue progressive_layer_drop quantize_training "
        "zero_optimization.offload_optimizer.super_offload",
        "frozen weights are kept in the model's dtype; zero_quantized_weights sends them as integers too. "
        "Remove it.": "zero_optimization.zero_quantized_nontrainable_weights",
        "the errors of quantized gradients are not carried over to the next step. Remove it.": "zero_optimization.zeropp_loco_param",
        "the models of a training script have one split; an engine reads it, with an autotp_size above 1. Remove it.": "tensor_parallel.partition_config",
        "checkpoints are written into the folder that the program names, by no service. Remove it.": "nebula",
        "a model generates with the code that trains it. Remove it.": "hybrid_engine",
        "settings are written to logs and checkpoints, where a key must not be. Set COMET_API_KEY, and remove it.": "comet.api_key",
        "write a bf16 or an fp16 block instead.": "amp fp8",
        "write a bf16 or an fp16 block instead; an engine reads it.": "torch_autocast",
        "weights are not quantized by a JSON. Remove it.": "weight_quantization",
        "checkpoints are written by this package, in the background if asked. Remove it.": "datastates_ckpt",
        "a batch has a fixed number of samples. Remove it.": "data_efficiency.data_sampling.dynamic_batching",
        "a training script takes --num-experts and --expert-model-parallel-size; a module of an engine has "
        "its own experts. Remove it.": "expert_parallel",
        "master weights and gradients are in fp32. Remove it.": "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states "
        "fp16.fp16_master_weights_and_grads",
        "initial weights follow from --seed and each weight's name. Remove it.": "pipeline.seed_layers",
        "activations are sent in their own dtype. Remove it.": "seq_parallel_communication_data_type",
    },
    only={
        "aio.use_gds": Answer(
            "files are read into host memory, from where they are copied to the device",
            "files are read into host memory, from where they are copied to the device, and not by GPUDirect. "
            "Remove it.",
            (False, None, "auto"),
        ),
        "checkpoint.use_node_local_storage": Answer(
            "all ranks save into one folder",
            "all ranks save into one folder, which all nodes must see, and not each node into a folder of its "
            "own. Remove it.",
            (False, None, "auto"),
        ),
        "zero_optimization.load_from_fp32_weights": Answer(
            "fp32 master weights are always loaded",
            "fp32 master weights are always loaded; without them the run would continue from rounded weights. "
            "Remove it.",
            (True, None, "auto"),
        ),
        "zero_optimization.zenflow": Answer(
            "it is off",
            "it is planned for a later version, and even an empty block turns it on in DeepSpeed. Remove it.",
            (None,),
        ),
        "bf16.check_grad_overflow": Answer(
            "a step whose gradient is not finite is always skipped",
            "a step whose gradient is not finite is always skipped. Remove it.",
            (True, None, "auto"),
        ),
        "data_efficiency.data_sampling.num_epochs": Answer(
            "the length of training is --train-iters, --train-samples or --train-tokens",
            "the length of training is --train-iters, --train-samples or --train-tokens. Set that, and "
            "remove it.",
            (1000, None, "auto"),
        ),
        "gradient_allreduce_op": Answer(
            "gradients are averaged",
            "gradients are averaged; an engine also sums them. Remove it.",
            ("mean", None, "auto"),
        ),
        "pipeline.activation_checkpoint_interval": Answer(
            "it is off",
            "write --recompute-granularity full instead. Remove it.",
            (0, None, "auto"),
        ),
        "managed_gradient_accumulation": Answer(
            "the script accumulates over gradient_accumulation_steps",
            "a training script accumulates gradients itself; an engine reads it. Remove it.",
            (True, None, "auto"),
        ),
    },
)

# Keys that are on unless a file switches them off, so that false asks for something.
ON_BY_DEFAULT = frozenset(
    f"zero_optimization.{name}"
    for name in (
        "compute_grad_norm",
        "load_from_fp32_weights",
        "memory_efficient_linear",
        "override_module_apply",
    )
)


def asks_for_default(key: str, value: Any) -> bool:
    """Return whether a value of an accepted key is the one that holds if the key is left out."""
    return value is not False if key in ON_BY_DEFAULT else asks_for_nothing(value)


def answer_to_flag(flag: str) -> Answer | None:
    """Return the answer to a flag of Megatron; None if the tables do not have it."""
    of_family = (answer for start, answer in FAMILIES.items() if flag.startswith(start))
    return FLAGS.get(flag) or next(of_family, None)


def answer_to_key(key: str) -> tuple[str, Answer] | None:
    """Return (key of the table, its answer) for a key or a key of a block under it; None without an answer.

    A key inside of a block comes before the block.
    """
    parts = key.split(".")
    for depth in range(len(parts), 0, -1):
        known = ".".join(parts[:depth])
        if known in KEYS:
            return known, KEYS[known]
    return None
