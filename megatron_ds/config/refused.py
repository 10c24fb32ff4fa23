"""Flags of Megatron-LM and Megatron-DeepSpeed that would change nothing here → why, and what to write instead.

A flag that is accepted has an effect. Scripts arrive with these, so each is answered by more than "unknown".
"""

from types import MappingProxyType

_ONE_MODEL = "there is one implementation of the model. Remove it."
_ALWAYS = "that is how it always works. Remove it."
_ASYNC = "its all-reduce always overlaps with the weight gradient. Remove it."
_KERNEL = "kernels are chosen by what the device can do. Remove it."
_SIGNALS = "the run always saves and exits on SIGTERM, SIGUSR1 and the first Ctrl-C. Remove it."
_RNG = "a checkpoint holds no random state, since every random number follows from --seed and its place. Remove it."
_PLAIN_RNG = "initial weights and dropout follow from --seed alone, the same on every layout. Remove it."

REFUSED_FLAGS = MappingProxyType({
    "--accumulate-allreduce-grads-in-fp32": "gradients accumulate in fp32 unless --main-grads-dtype says other. Remove it.",
    "--apply-query-key-layer-scaling": "core attention works in fp32 inside, so scores need no second scaling. Remove it.",
    "--async-tensor-model-parallel-allreduce": _ASYNC,
    "--attention-backend": _KERNEL,
    "--attention-softmax-in-fp32": _ALWAYS,
    "--ckpt-format": "there is one format, which loads at any layout. Remove it.",
    "--data-impl": "there is one format of data, .bin/.idx. Remove it.",
    "--dataset-impl": "there is one format of data, .bin/.idx. Remove it.",
    "--ddp-backend": "gradients are reduced from flat buffers, whatever --zero-stage says. Remove it.",
    "--DDP-impl": "gradients are reduced from flat buffers, whatever --zero-stage says. Remove it.",
    "--deepspeed": "--deepspeed_config alone is enough. Remove it.",
    "--deepspeed-mpi": "the launcher is recognised by itself. Remove it.",
    "--dist-ckpt-format": "there is one format, which loads at any layout. Remove it.",
    "--distributed-backend": "it is NCCL on CUDA devices and gloo elsewhere. Remove it.",
    "--distributed-timeout": "write --distributed-timeout-minutes.",
    "--exit-signal": _SIGNALS,
    "--exit-signal-handler": _SIGNALS,
    "--fim-eod-token": "documents end with the tokenizer's own token. Remove it.",
    "--fim-pad-token": "what pads a short sample is never seen by the model. Remove it.",
    "--fp32-residual-connection": "residuals are added in the format of the weights. Remove it.",
    "--local-rank": "the launcher's environment says it. Remove it.",
    "--no-async-tensor-model-parallel-allreduce": _ASYNC,
    "--no-bias-dropout-fusion": _KERNEL,
    "--no-bias-gelu-fusion": _KERNEL,
    "--no-create-attention-mask-in-dataloader": _ALWAYS,
    "--no-gradient-accumulation-fusion": _KERNEL,
    "--no-load-rng": _RNG,
    "--no-masked-softmax-fusion": _KERNEL,
    "--no-mmap-bin-files": "data files are always mapped. Remove it.",
    "--no-pipeline-parallel": "write --pipeline-model-parallel-size 1, the default.",
    "--no-query-key-layer-scaling": "that is the default. Remove it.",
    "--no-save-rng": _RNG,
    "--num-layers-per-stage": "write --pipeline-layout, such as 3,2,3.",
    "--log-throughput": "the log line always has it. Remove it.",
    "--overlap-param-gather": "weights are gathered right after the step. Remove it.",
    "--override-opt-param-scheduler": "the learning rate is a function of the flags and of progress, never stored. Remove it.",
    "--pipeline-model-parallel-split-rank": "there are no encoder-decoder models. Remove it.",
    "--data-parallel-random-init": _PLAIN_RNG,
    "--tensorboard-log-interval": "TensorBoard gets a point at each --log-interval. Remove it.",
    "--transformer-impl": _ONE_MODEL,
    "--use-checkpoint-opt-param-scheduler": "the learning rate is a function of the flags and of progress, never stored. "
                                            "Remove it.",
    "--use-cpu-initialization": _PLAIN_RNG,
    "--use-dist-ckpt": "there is one format, which loads at any layout. Remove it.",
    "--use-flash-attn": _KERNEL,
    "--use-flash-attn-v2": _KERNEL,
    "--use-legacy-models": _ONE_MODEL,
    "--use-mcore-models": _ONE_MODEL,
    "--use-torch-fsdp2": "write --zero-stage.",
    "--virtual-pipeline-model-parallel-size": "write --num-virtual-stages-per-pipeline-rank.",
})

_LATER = "it is not available yet. Remove it."
_FLAT = "gradients live in flat buckets, each reduced once by the collective that its ZeRO stage needs. Remove it."
_STAGE3 = "layers are gathered in the order of the model and released after use; there is nothing to tune there. Remove it."
_PINNED = "host memory is page-locked where there is a GPU. Remove it."
_BUFFERS = "there are as many buffers as are read, updated and written at a time; see sub_group_size. Remove it."
_MONITOR = "metrics go to the log, to TensorBoard and to --metrics-jsonl. Remove it."
_LOADER = "batches come from the --data-path of the flags. Remove it."

# Keys of DeepSpeed's JSON that would change nothing here → why. A key covers the block under it.
REFUSED_KEYS = MappingProxyType({
    "activation_checkpointing": "write --recompute-granularity full or selective. Remove it.",
    "aio.overlap_events": _ALWAYS,
    "aio.single_submit": "blocks are submitted together. Remove it.",
    "aio.use_gds": _LATER,
    "amp": "write a bf16 or an fp16 block instead.",
    "autotuning": _LATER,
    "bf16.check_grad_overflow": "a step with a gradient that is not finite is always skipped. Remove it.",
    "bf16.immediate_grad_update": "gradients are always added to the buffer as they come. Remove it.",
    "comms_logger": _LATER,
    "compression_training": _LATER,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "data_efficiency.data_sampling.dynamic_batching": "a batch has a fixed number of samples, and the learning rate is not "
                                                      "scaled behind your back. Remove it.",
    "data_efficiency.data_sampling.num_epochs": "the length of training is --train-iters or --train-samples. Remove it.",
    "data_efficiency.data_sampling.pin_memory": "host memory is page-locked where there is a GPU. Remove it.",
    "dataloader_drop_last": _LOADER,
    "disable_allgather": _FLAT,
    "dump_state": "startup always prints every value that is not default. Remove it.",
    "elasticity": _LATER,
    "flops_profiler": "the log line has TFLOP/s. Remove it.",
    "fp16.auto_cast": "weights and activations are in fp16. Remove it.",
    "fp16.consecutive_hysteresis": "hysteresis is refilled when the scale grows. Remove it.",
    "fp16.fp16_master_weights_and_grads": "master weights and gradients are in fp32. Remove it.",
    "gradient_allreduce_op": "gradients are averaged. Remove it.",
    "memory_breakdown": _LATER,
    "monitor_config": _MONITOR,
    "optimizer.legacy_fusion": "the fastest implementation is chosen by itself. Remove it.",
    "optimizer.params.adam_w_mode": "weight decay is always decoupled. Remove it.",
    "optimizer.params.amsgrad": _LATER,
    "optimizer.params.bias_correction": "Adam always corrects its bias. Remove it.",
    "optimizer.params.max_grad_norm": 'write "gradient_clipping" at the top level.',
    "optimizer.params.torch_adam": "the fastest implementation is chosen by itself. Remove it.",
    "pipeline.activation_checkpoint_interval": "write --recompute-granularity full. Remove it.",
    "pipeline.grad_partitioned": "write --sequence-parallel, with which only a slice travels. Remove it.",
    "pipeline.pipe_partitioned": "write --sequence-parallel, with which only a slice travels. Remove it.",
    "pipeline.seed_layers": "initial weights follow from --seed and each weight's name. Remove it.",
    "pipeline.use_reentrant": "recomputation never re-enters autograd. Remove it.",
    "seq_parallel_communication_data_type": "activations travel in their own format. Remove it.",
    "sparse_gradients": "all gradients are dense. Remove it.",
    "torch_autocast": "write a bf16 or an fp16 block instead.",
    "wall_clock_breakdown": _LATER,
    "wandb": _MONITOR,
    "zero_allow_untested_optimizer": "every optimizer here works with every ZeRO stage. Remove it.",
    "zero_force_ds_cpu_optimizer": "every optimizer here can be offloaded. Remove it.",
    "zero_optimization.allgather_partitions": _FLAT,
    "zero_optimization.contiguous_gradients": _FLAT,
    "zero_optimization.cpu_offload": 'write "offload_optimizer": {"device": "cpu"}.',
    "zero_optimization.cpu_offload_params": 'write "offload_param": {"device": "cpu"}.',
    "zero_optimization.cpu_offload_use_pin_memory": _PINNED,
    "zero_optimization.elastic_checkpoint": "every checkpoint loads at any layout. Remove it.",
    "zero_optimization.ignore_unused_parameters": _FLAT,
    "zero_optimization.legacy_stage1": _FLAT,
    "zero_optimization.load_from_fp32_weights": "fp32 masters are always loaded. Remove it.",
    "zero_optimization.reduce_scatter": _FLAT,
    "zero_optimization.round_robin_gradients": _FLAT,
    "zero_optimization.use_multi_rank_bucket_allreduce": _FLAT,
    "zero_optimization.zero_quantized_gradients": _LATER,
    "zero_optimization.zero_quantized_weights": _LATER,
    **{f"zero_optimization.offload_{what}.{name}": reason for what, name, reason in (
        ("optimizer", "buffer_count", _BUFFERS), ("optimizer", "pin_memory", _PINNED), ("optimizer", "pipeline", _ALWAYS),
        ("optimizer", "pipeline_read", _ALWAYS), ("optimizer", "pipeline_write", _ALWAYS), ("optimizer", "fast_init", _ALWAYS),
        ("optimizer", "super_offload", _LATER), ("optimizer", "cpuadam_cores_perc", "set OMP_NUM_THREADS. Remove it."),
        ("param", "buffer_count", _BUFFERS), ("param", "buffer_size", _BUFFERS), ("param", "pin_memory", _PINNED),
        ("param", "max_in_cpu", "weights are either in the host's memory or on the disk. Remove it."))},
    **{f"zero_optimization.stage3_{name}": _STAGE3 for name in (
        "gather_16bit_weights_on_model_save", "max_live_parameters", "max_reuse_distance", "model_persistence_threshold",
        "module_granularity_threshold", "use_all_reduce_for_fetch_params")},
})
