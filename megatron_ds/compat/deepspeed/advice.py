"""DeepSpeed's names that are not available → what to use. Their placeholders raise these sentences.

ADVICE[module]   names → sentence
NOT_HERE         packages of DeepSpeed of which nothing is available → sentence
"""

from collections.abc import Mapping

PIPELINE = (
    "an engine trains a module as a whole, without pipeline stages: PipelineModule has num_stages=1. "
    "pretrain_gpt.py trains this package's models with --pipeline-model-parallel-size; for a module of "
    "your own use ZeRO stage 3."
)
INFERENCE = (
    "give init_inference its keys as a dict or as arguments (docs/use/inference_engine.md). For many "
    "requests at a time, export the weights with engine.save_safetensors(folder) and load them into an "
    "inference server."
)
HYBRID = "generate inside of `with engine.gathered_parameters():` with engine.module.generate(…)."
COMPRESSION = "compression of models (quantization, pruning, distillation of layers) is not part of it."
INTERNAL = (
    "it belongs to the implementation of DeepSpeed. Use the engine's methods; docs/use/engine.md "
    "lists them."
)
KERNELS = "torch's scaled_dot_product_attention, or the layers of megatron_ds.models, take its place."
SEQUENCE = (
    "use deepspeed.sequence.layer.DistributedAttention in the module's attention, or pretrain_gpt.py "
    "with --context-parallel-size (docs/scale/long_sequences.md)."
)
BUILDERS = (
    "extensions are compiled when the package is installed; docs/reference/kernels.md lists them. "
    "No builder is needed."
)
TENSOR_PARALLEL = (
    'give initialize "tensor_parallel": {"autotp_size": n} in the config, or call tp_model_init before it: it divides '
    "the model itself (docs/use/engine.md)."
)
MICS = (
    'use zero.Init with "zero_hpz_partition_size" in the config: ranks of a node then gather weights '
    "among themselves."
)
CURRICULUM = (
    'give initialize training_data= and "data_efficiency" in the config, and use convert_to_random_ltd '
    "(docs/use/engine.md)."
)
PROFILER = (
    'use "flops_profiler" and "wall_clock_breakdown" in the config, or FlopsProfiler and get_model_profile of '
    "megatron_ds.profiling.flops_profiler; torch.profiler for single calls."
)
COMMUNICATION = 'use "comms_logger" in the config, and megatron_ds.comm.log_summary().'
BINDING = "start the program with megatron-ds launch --bind_cores_to_rank."
MONITOR = 'use engine.monitor.write_events, with "tensorboard", "csv_monitor", "wandb" or "comet" in the config.'
ONEBIT = (
    'name it in the config, {"optimizer": {"type": "OneBitAdam", …}}: it exchanges compressed momenta '
    "instead of gradients, so the engine must make it."
)
PLAIN_MOE = "use deepspeed.moe.layer.MoE, whose gate and exchange of tokens are megatron_ds.moe."
CONVERT = (
    "engine.load_checkpoint reads folders of DeepSpeed, universal ones too, at any stage and number "
    "of ranks; docs/scale/checkpoints.md describes the conversion."
)
RNG = "activations are not split over ranks; the tracker of random states is get_cuda_rng_tracker()."
ELASTIC = (
    "checkpoints load on any number of ranks; megatron-ds launch --max-restarts N --min-nodes M starts a program "
    "again, with fewer hosts if some are lost."
)
SWAP = (
    'use "offload_optimizer" and "offload_param" with "device": "nvme" in the config.'
)

ADVICE: Mapping[str, Mapping[str, str]] = {
    "": {
        "DualPipeVModule DualPipeVEngine": PIPELINE,
        "DeepSpeedInferenceConfig": INFERENCE,
        "DeepSpeedHybridEngine": HYBRID,
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig replace_transformer_layer "
        "revert_transformer_layer": KERNELS,
        "set_autotp_mode load_ds_config": TENSOR_PARALLEL,
        "set_optimizer_flags": 'the config\'s "Muon" chooses its matrices itself '
        "(docs/scale/optimizers.md).",
    },
    "checkpoint": {
        "ZeROCheckpoint model_3d_desc get_model_3d_descriptor enable_universal_checkpoint "
        "SubparamShape": CONVERT
    },
    "checkpoint.ds_to_universal": {
        "main parse_arguments extract_zero_shards merge_tp_slices "
        "extract_zero_shards_stage3 merge_zero3_slices": CONVERT
    },
    "checkpoint.deepspeed_checkpoint": {"DeepSpeedCheckpoint": CONVERT},
    "checkpoint.universal_checkpoint": {
        "SubparamShape enable_universal_checkpoint load_hp_checkpoint_state": CONVERT
    },
    "checkpoint.reshape_utils": {
        "partition_data merge_state get_files get_zero_files": CONVERT
    },
    "checkpointing": {
        "CudaRNGStatesTracker partition_activations get_partition_size get_partition_start "
        "gather_partitioned_activations partition_activations_in_checkpoint "
        "model_parallel_reconfigure_tp_seed set_num_layers": RNG
    },
    "moe.sharded_moe": {
        "TopKGate MOELayer top1gating top2gating topkgating einsum gumbel_rsample "
        "multiplicative_jitter": PLAIN_MOE
    },
    "moe.mappings": {"gather_tokens drop_tokens": PLAIN_MOE},
    "monitor.monitor": {
        "Monitor TensorBoardMonitor WandbMonitor csvMonitor CometMonitor": MONITOR
    },
    "monitor.config": {"DeepSpeedMonitorConfig get_monitor_config": MONITOR},
    "ops": {"DeepSpeedTransformerLayer DeepSpeedTransformerConfig": KERNELS},
    "pipe": {"DualPipeVModule": PIPELINE},
    "runtime.activation_checkpointing.config": {
        "DeepSpeedActivationCheckpointingConfig": INTERNAL
    },
    "runtime.bf16_optimizer": {"BF16_Optimizer": INTERNAL},
    "runtime.config_utils": {
        "DeepSpeedConfigModel get_scalar_param get_dict_param get_list_param "
        "dict_raise_error_on_duplicate_keys DeepSpeedConfigObject": INTERNAL
    },
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": {"FP16_Optimizer": INTERNAL},
    "runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": INTERNAL},
    "runtime.fp16.loss_scaler": {
        "CreateLossScaler LossScalerBase LossScaleConfig": INTERNAL
    },
    "runtime.fp16.onebit": {"OnebitAdam OnebitLamb ZeroOneAdam": ONEBIT},
    "runtime.fp16.onebit.adam": {"OnebitAdam": ONEBIT},
    "runtime.fp16.onebit.lamb": {"OnebitLamb": ONEBIT},
    "runtime.fp16.onebit.zoadam": {"ZeroOneAdam": ONEBIT},
    "runtime.hybrid_engine": {"DeepSpeedHybridEngine": HYBRID},
    "runtime.pipe.p2p": {
        "send recv send_obj recv_obj init_process_groups can_send_recv": PIPELINE
    },
    "runtime.pipe.topology": {"PipelineParallelGrid": PIPELINE},
    "pipe.topology": {},
    "runtime.utils": {
        "PartitionedTensor CheckOverflow get_weight_norm get_flattened_grad_norm get_grad_norm "
        "get_norm_with_moe_layers get_global_norm_of_tensors clip_tensors_by_global_norm "
        "align_dense_tensors all_gather_dp_groups get_inactive_params get_grad_zeros TLinear "
        "mask_nan_or_inf_with_val_inplace": INTERNAL
    },
    "runtime.weight_quantizer": {"WeightQuantization": COMPRESSION},
    "runtime.state_dict_factory": {
        "SDLoaderFactory SDLoaderBase MegatronSDLoader": CONVERT
    },
    "runtime.sequence_parallel.ulysses_sp": {
        "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter sequence_tiled_compute SequenceTiledCompute "
        "TiledMLP TiledFusedLogitsLoss": SEQUENCE
    },
    "runtime.sequence_parallel.parallel_state_sp": {
        "initialize_sequence_parallel get_sequence_parallel_group get_sequence_parallel_world_size "
        "get_sequence_parallel_rank get_sequence_data_parallel_group": SEQUENCE
    },
    "runtime.zero.linear": {
        "LinearModuleForZeroStage3 LinearFunctionForZeroStage3 "
        "zero3_linear_wrap": INTERNAL
    },
    "runtime.zero.mics": {"MiCS_Init MiCS_Optimizer MiCS_Offload": MICS},
    "runtime.zero.partitioned_param_coordinator": {
        "PartitionedParameterCoordinator InflightParamRegistry iter_params": INTERNAL
    },
    "sequence.cross_entropy": {
        "vocab_sequence_parallel_cross_entropy vocab_parallel_cross_entropy": SEQUENCE
    },
    "sequence.fpdt_layer": {
        "FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss": SEQUENCE
    },
    "sequence.layer": {"single_all_to_all": SEQUENCE},
    "utils": {
        "z3_leaf_parameter": "marks are on modules: use z3_leaf_module(module).",
        "get_numactl_cmd": BINDING,
        "get_full_hp_param set_full_hp_param get_full_hp_grad set_full_hp_grad "
        "get_hp_fragment_mapping fragment_address map_to_flat_opt_states link_hp_params "
        "lazy_init_hp_params_optimizer_state get_caller_func": "use safe_get_full_fp32_param and its like, of megatron_ds.utils.",
    },
    "utils.comms_logging": {
        "CommsLogger get_caller_func convert_size calc_bw_log": COMMUNICATION
    },
    "utils.debug": {
        "debug_extract_module_and_param_names debug_param2name debug_param2name_id_shape "
        "debug_module2name debug_module2name_class printflock log_rank_file print_rank "
        "debug_module2name_id debug_param2name_id debug_param2name_id_numel "
        "debug_param2name_id_shape_device print_backward_tensors": "parameters have names: module.named_parameters()."
    },
    "utils.numa": {"get_numactl_cmd get_numa_cores": BINDING},
    "zero": {
        "MiCS_Init": MICS,
        "DeepSpeedZeRoOffload ZeROOrderedDict DeepSpeedTensorOverride "
        "zero_wrapper_for_fp_tensor_constructor get_new_tensor_fn_for_dtype shutdown_init_context "
        "restore_init_context InsertPostInitMethodToModuleSubClasses AllGatherHandle free_param "
        "AllGatherCoalescedHandle get_all_subclasses": INTERNAL,
        "_orig_torch_arange _orig_torch_empty": INTERNAL,
    },
}

NOT_HERE: Mapping[str, str] = {
    "autotuning": "start the program with megatron-ds launch --autotuning tune or run (docs/use/engine.md).",
    "compile": "compile the module with torch.compile before initialize.",
    "compression": COMPRESSION,
    "elasticity": ELASTIC,
    "inference": INFERENCE,
    "io": INTERNAL,
    "launcher": "start programs with megatron-ds launch, torchrun, srun or mpirun.",
    "linear": "use a library for adapters, such as peft; parameters that do not require gradients stay "
    "frozen.",
    "model_implementations": INFERENCE,
    "module_inject": TENSOR_PARALLEL,
    "nebula": CONVERT,
    "nvme": SWAP,
    "ops.aio": SWAP,
    "ops.fp_quantizer": COMPRESSION,
    "ops.op_builder": BUILDERS,
    "ops.quantizer": COMPRESSION,
    "ops.random_ltd": CURRICULUM,
    "ops.transformer": KERNELS,
    "ops.deepspeed4science": KERNELS,
    "ops.spatial": KERNELS,
    "ops.triton_ops": KERNELS,
    "profiling": PROFILER,
    "env_report": "use megatron-ds env.",
    "runtime.checkpoint_engine": CONVERT,
    "runtime.comm": INTERNAL,
    "runtime.compiler": "compile the module with torch.compile before initialize.",
    "runtime.data_pipeline": CURRICULUM,
    "runtime.domino": TENSOR_PARALLEL,
    "runtime.rollout": HYBRID,
    "runtime.swap_tensor": SWAP,
    "runtime.superoffload": SWAP,
    "runtime.tensor_parallel": TENSOR_PARALLEL,
    "runtime.zenflow": SWAP,
    "runtime.eigenvalue": COMPRESSION,
    "runtime.quantize": COMPRESSION,
    "runtime.progressive_layer_drop": CURRICULUM,
    "runtime.activation_checkpointing.offload_activations": "call megatron_ds.checkpointing.configure with checkpoint_in_cpu=True, "
    "and pass layers to megatron_ds.checkpointing.checkpoint.",
    "sequence": SEQUENCE,
    "tools": PROFILER,
}
