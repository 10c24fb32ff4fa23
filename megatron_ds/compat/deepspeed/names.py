"""DeepSpeed's public names (0.19.8) → what they are here. The names that are not available are in
deepspeed/advice.py.

    HERE[module][name]   "errors:ConfigError" is `megatron_ds.errors.ConfigError`, "errors:" a module,
                         "=text" a string
    SAME[module]         the module with the same names; of DeepSpeed, or of this package

Names that a module of this package has by itself (`megatron_ds.zero.Init`) are not listed.
"""

from collections.abc import Mapping

_FUNCTIONS = "compat.deepspeed.functions:"
_SCHEDULES = "compat.deepspeed.schedules:"
_GROUPS = "compat.deepspeed.groups:"
_OPTIMIZERS = "compat.deepspeed.optimizers:"
_CLASSES = "compat.deepspeed.classes:"
_TIMERS = "compat.deepspeed.timers:"
_MODULES = "compat.engine.leaf_modules:"
_UTILS = "compat.deepspeed.utils:"
_COMM = "compat.deepspeed.comm:"
_ACCELERATOR = "compat.deepspeed.accelerator:"
_SEQUENCE = "compat.deepspeed.sequence:"
_ELASTICITY = "compat.deepspeed.elasticity:"
_ENGINE = "compat.engine:"
_OPTIMIZER = "compat.engine.optimizer:"
_LOADER = "compat.engine.loader:"
_GETTERS = "compat.deepspeed.getters:"
_INFERENCE = "compat.inference.engine:"
_ZERO_CONFIG = "compat.deepspeed.zero_config:"


def _each(prefix: str, names: str) -> dict[str, str]:
    """name → prefix and name"""
    return {name: prefix + name for name in names.split()}


def _texts(names: str) -> dict[str, str]:
    """Constants "NAME=text": NAME → "=text". A NAME alone is its own text in lower case."""
    pairs = (name.partition("=") for name in names.split())
    return {name: f"={text or name.lower()}" for name, _, text in pairs}


ENGINE = {
    "DeepSpeedEngine": _ENGINE + "Engine",
    "DeepSpeedOptimizer": _OPTIMIZER + "EngineOptimizer",
    "ZeROOptimizer": _OPTIMIZER + "EngineOptimizer",
    "DeepSpeedOptimizerCallable": "compat.engine.client_optimizer:ClientOptimizer",
    "DeepSpeedSchedulerCallable": _OPTIMIZER + "SchedulerMaker",
}
CONFIG = {
    "DeepSpeedConfig": _CLASSES + "DeepSpeedConfig",
    "DeepSpeedConfigError": "errors:ConfigError",
}
OPTIMIZER_NAMES = _texts(
    "ADAM_OPTIMIZER=adam ADAMW_OPTIMIZER=adamw ADAGRAD_OPTIMIZER=adagrad "
    "LAMB_OPTIMIZER=lamb LION_OPTIMIZER=lion MUON_OPTIMIZER=muon "
    "ONEBIT_ADAM_OPTIMIZER=onebitadam ONEBIT_LAMB_OPTIMIZER=onebitlamb "
    "ZERO_ONE_ADAM_OPTIMIZER=zerooneadam MUADAM_OPTIMIZER=muadam "
    "MUADAMW_OPTIMIZER=muadamw MUSGD_OPTIMIZER=musgd"
)
SCHEDULES = _each(
    _SCHEDULES,
    "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR VALID_LR_SCHEDULES "
    "add_tuning_arguments get_config_from_args get_lr_from_config",
)
LEAVES = _each(
    _MODULES,
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module "
    "set_z3_leaf_module set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix",
)
PROFILER = {
    "FlopsProfiler": "compat.engine.module_profiler:ModuleProfiler",
    **_each(
        "compat.engine.module_profiler:",
        "get_model_profile number_to_string flops_to_string macs_to_string params_to_string "
        "bytes_to_string duration_to_string",
    ),
}
ESTIMATES_2 = _each(
    _FUNCTIONS,
    "estimate_zero2_model_states_mem_needs_all_live "
    "estimate_zero2_model_states_mem_needs_all_cold",
)
ESTIMATES_3 = _each(
    _FUNCTIONS,
    "estimate_zero3_model_states_mem_needs_all_live "
    "estimate_zero3_model_states_mem_needs_all_cold",
)
MOE_GROUPS = _each(
    "compat.deepspeed.moe:",
    "has_moe_layers is_moe_param is_moe_param_group "
    "split_params_into_different_moe_groups_for_optimizer configure_moe_param_groups "
    "split_params_into_shared_and_expert_params "
    "split_params_grads_into_shared_and_expert_params",
)
LOGGING = _each(_UTILS, "log_dist logger") | _each(
    _FUNCTIONS, "log_dist_once warning_once set_log_level_from_string print_dist"
)
ADAM = _each("ops.adam:", "FusedAdam DeepSpeedCPUAdam")
LION = _each(_OPTIMIZERS, "FusedLion DeepSpeedCPULion")
LAMB = _each(_OPTIMIZERS, "FusedLamb")
ADAGRAD = _each(_OPTIMIZERS, "DeepSpeedCPUAdagrad")
TOPOLOGY = _each(
    "compat.deepspeed.topology:",
    "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology",
)
PIPELINE = _each(
    "compat.engine.pipeline_module:", "PipelineModule LayerSpec TiedLayerSpec"
)
PIPELINE_ENGINE = {
    "PipelineEngine": "compat.engine.pipeline:PipelineEngine",
    "PipelineError": "compat.engine.pipeline_module:PipelineError",
}
SPARSITY = _each(
    "compat.deepspeed.sparsity_configs:",
    "SparsityConfig DenseSparsityConfig FixedSparsityConfig VariableSparsityConfig BigBirdSparsityConfig "
    "BSLongformerSparsityConfig LocalSlidingWindowSparsityConfig",
)
SPARSE = _each(
    "compat.deepspeed.sparse_attention:", "SparseSelfAttention BertSparseSelfAttention"
)
SPARSE_UTILS = _each("compat.deepspeed.sparse_attention_utils:", "SparseAttentionUtils")
INFERENCE = _each(_INFERENCE, "InferenceEngine init_inference default_inference_config")
PIPE_SCHEDULES = _each(
    "compat.deepspeed.pipe_schedule:",
    "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction OptimizerStep "
    "ReduceGrads ReduceTiedGrads BufferOpInstruction LoadMicroBatch ForwardPass BackwardPass "
    "SendActivation RecvActivation SendGrad RecvGrad",
)
CHECKPOINT_FILES = _each(
    "compat.deepspeed.checkpoint_files:",
    "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank",
)
LAUNCHED = _each(
    _FUNCTIONS,
    "get_local_rank_from_launcher get_world_rank_from_launcher "
    "get_world_size_from_launcher",
)
OFFLOAD_CONFIG = _each(
    _ZERO_CONFIG, "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig"
)
LEAF_CONFIG = _each(_ZERO_CONFIG, "DeepSpeedZeroLeafModuleConfig")
MONITORS = {"MonitorMaster": _CLASSES + "MonitorMaster"}

# module → name → target
# Of Megatron-LM's parallel_state, and the functions that DeepSpeed calls on an mpu.
GETTERS = _each(
    _GETTERS,
    "get_tensor_model_parallel_group get_tensor_model_parallel_world_size "
    "get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank "
    "get_pipeline_model_parallel_group get_pipeline_model_parallel_world_size "
    "get_pipeline_model_parallel_rank get_pipeline_model_parallel_first_rank "
    "get_pipeline_model_parallel_last_rank get_pipeline_model_parallel_next_rank "
    "get_pipeline_model_parallel_prev_rank "
    "get_virtual_pipeline_model_parallel_world_size "
    "is_pipeline_first_stage is_pipeline_last_stage "
    "get_data_parallel_group get_data_parallel_world_size "
    "get_data_parallel_rank get_data_parallel_src_rank "
    "get_context_parallel_group get_context_parallel_world_size "
    "get_context_parallel_rank get_context_parallel_global_ranks "
    "get_expert_model_parallel_group get_expert_model_parallel_world_size "
    "get_expert_model_parallel_rank "
    "get_expert_data_parallel_group get_expert_data_parallel_world_size "
    "get_expert_data_parallel_rank "
    "get_embedding_group is_rank_in_embedding_group "
    "get_model_parallel_group get_model_parallel_world_size "
    "get_model_parallel_rank get_model_parallel_src_rank",
)
HERE: Mapping[str, Mapping[str, str]] = {
    "mpu": GETTERS,
    "profiling.flops_profiler": PROFILER,
    "profiling.flops_profiler.profiler": PROFILER,
    "": {
        **ENGINE,
        **CONFIG,
        **OPTIMIZER_NAMES,
        **INFERENCE,
        "tp_model_init": "compat.engine.auto_tensor_parallel:tp_model_init",
        "get_accelerator": _ACCELERATOR + "get_accelerator",
        "OnDevice": _FUNCTIONS + "OnDevice",
        **_each(_UTILS, "log_dist logger"),
        "dist": _COMM,
        "add_tuning_arguments": _SCHEDULES + "add_tuning_arguments",
        "DeepSpeedDataLoader": _LOADER + "EngineLoader",
        "PipelineModule": PIPELINE["PipelineModule"],
        "PipelineEngine": PIPELINE_ENGINE["PipelineEngine"],
        "DistributedAttention": _SEQUENCE + "DistributedAttention",
    },
    "accelerator": {
        "DeepSpeedAccelerator": _ACCELERATOR + "Accelerator",
        **_each(_FUNCTIONS, "set_accelerator is_current_accelerator_supported"),
    },
    "inference.engine": {"InferenceEngine": INFERENCE["InferenceEngine"]},
    "inference": {"InferenceEngine": INFERENCE["InferenceEngine"]},
    "checkpoint": {
        "DeepSpeedCheckpoint": _CLASSES + "DeepSpeedCheckpoint",
        **CHECKPOINT_FILES,
    },
    "checkpoint.deepspeed_checkpoint": _texts(
        "ARGS_KEY=args CHECKPOINT_INFO_KEY=checkpoint_info ITERATION_KEY=iteration "
        "USE_DATA_BEFORE_EXPERT_PARALLELISM"
    ),
    "checkpoint.constants": _texts(
        "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP "
        "SINGLE_PARTITION_OF_FP32_GROUPS PARAM_GROUPS GROUP_PADDINGS PARTITION_COUNT ZERO_STAGE CLIP_GRAD "
        "FP32_WEIGHT_KEY=fp32 LOSS_SCALER PARAM PARAM_SHAPES BUFFER_NAMES FROZEN_PARAM_SHAPES "
        "FROZEN_PARAM_FRAGMENTS MODEL_FILE_PREFIX=mp_rank_ ZERO_FILE_PREFIX=zero_pp_rank_ "
        "OPTIM_FILE_SUFFIX=_optim_states.pt MODEL_FILE_SUFFIX=_model_states.pt LAYER_FILE_PREFIX=layer_ "
        "BF16_ZERO_FILE_PREFIX=bf16_zero_pp_rank_ FP16_ZERO_FILE_PREFIX=fp16_zero_pp_rank_ DS_VERSION "
        "UNIVERSAL_CHECKPOINT_INFO CAT_DIM PARAM_N_SUB_PARAMS SUB_PARAM_SHAPE VOCAB_TENSOR "
        "PADDED_VOCAB_SIZE ORIGINAL_VOCAB_SIZE PARAM_SLICE_MAPPINGS "
        "UNIVERSAL_CHECKPOINT_VERSION_KEY=universal_checkpoint_version "
        "TP_REPLICATED_PARAMETER_PATTERNS=tp_replicated_parameter_patterns "
        "PARAMETER_TO_AVERAGE_PATTERNS=parameter_to_average_patterns "
        "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS=parameter_with_row_parallelism_patterns "
        "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0=parameter_with_2_sub_params_cat_dim_0 "
        "PARAMETER_WITH_SUB_PARAMS=parameter_with_sub_params "
        "VOCABULARY_PARAMETER_PATTERNS=vocabulary_parameter_patterns"
    ),
    "checkpoint.utils": {
        **_each(_FUNCTIONS, "clone_tensors_for_torch_save"),
        **CHECKPOINT_FILES,
    },
    "comm": {
        "inference_all_reduce": _COMM + "all_reduce",
        "configure": _FUNCTIONS + "configure_comms",
        "initialize_mesh_device": _COMM + "init_device_mesh",
        **_each(_FUNCTIONS, "log_summary get_all_ranks_from_group"),
        **LAUNCHED,
    },
    "comm.utils": LAUNCHED,
    "constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": _CLASSES + "DEFAULT_PORT",
        "default_pg_timeout": "mpu.launch:DEFAULT_TIMEOUT",
        **_texts("CROSS_RANK=CROSS_RANK CROSS_SIZE=CROSS_SIZE"),
    },
    "elasticity": _each(
        _ELASTICITY,
        "compute_elastic_config elasticity_enabled ElasticityError ElasticityConfigError "
        "ElasticityIncompatibleWorldSize",
    ),
    "launcher.runner": _each(
        "extensions.launch.deepspeed_runner:",
        "main parse_resource_filter _parse_hostfile",
    ),
    "moe.utils": MOE_GROUPS,
    "monitor.monitor": MONITORS,
    "ops.adagrad": ADAGRAD,
    "ops.lamb": LAMB,
    "ops.lion": LION,
    "ops.sparse_attention": {**SPARSITY, **SPARSE, **SPARSE_UTILS},
    "runtime.base_optimizer": ENGINE,
    "runtime.config": {**CONFIG, **OPTIMIZER_NAMES},
    "runtime.data_pipeline.data_routing.helper": _each(
        "compat.deepspeed.random_ltd_helpers:",
        "convert_to_random_ltd save_without_random_ltd remove_random_ltd_state_dict",
    ),
    "runtime.data_pipeline.data_routing.scheduler": {
        "RandomLTDScheduler": "compat.engine.dropped_tokens:RandomLTDSchedule",
    },
    "runtime.dataloader": {
        "RepeatingLoader": _ENGINE + "RepeatingLoader",
        "DeepSpeedDataLoader": _LOADER + "EngineLoader",
    },
    "runtime.engine": {
        **ENGINE,
        **OPTIMIZER_NAMES,
        "MEMORY_OPT_ALLREDUCE_SIZE": _CLASSES + "ALLREDUCE_SIZE",
    },
    "runtime.fp16.loss_scaler": _each(_CLASSES, "LossScaler DynamicLossScaler"),
    "runtime.lr_schedules": SCHEDULES
    | _texts(
        "LR_RANGE_TEST=LRRangeTest ONE_CYCLE=OneCycle WARMUP_LR=WarmupLR WARMUP_DECAY_LR=WarmupDecayLR "
        "WARMUP_COSINE_LR=WarmupCosineLR WARMUP_LOG_RATE=log WARMUP_LINEAR_RATE=linear LR_SCHEDULE "
        "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE "
        "CYCLE_FIRST_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT "
        "DECAY_STEP_SIZE CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE "
        "WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO "
        "TOTAL_NUM_STEPS EDGE_VALUE MID_VALUE"
    ),
    "pipe": {**TOPOLOGY, **PIPELINE, **PIPELINE_ENGINE},
    "runtime.pipe.engine": PIPELINE_ENGINE,
    "runtime.pipe.module": {
        **PIPELINE,
        "PipelineError": PIPELINE_ENGINE["PipelineError"],
    },
    "runtime.pipe.schedule": PIPE_SCHEDULES,
    "runtime.pipe.topology": TOPOLOGY,
    "runtime.utils": _each(
        _FUNCTIONS,
        "see_memory_usage memory_status partition_uniform partition_balanced "
        "prefix_sum_inc set_random_seed ensure_directory_exists call_to_str "
        "noop_decorator "
        "noop_context required_torch_version empty_cache move_to_device copy_to_device "
        "get_only_unique_item is_model_parallel_parameter clip_grad_norm_ "
        "get_global_norm get_ma_status",
    )
    | _each(_CLASSES, "DummyOptim"),
    "runtime.zero.config": {
        **_each(_CLASSES, "ZeroStageEnum OffloadDeviceEnum"),
        **_each(_ZERO_CONFIG, "DeepSpeedZeroConfig get_zero_config"),
        **OFFLOAD_CONFIG,
        **LEAF_CONFIG,
    },
    "runtime.zero.leaf_module_config": LEAF_CONFIG
    | _each(
        _ZERO_CONFIG,
        "DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    ),
    "runtime.zero.offload_config": OFFLOAD_CONFIG
    | _each(_CLASSES, "OffloadDeviceEnum OffloadStateTypeEnum"),
    "runtime.zero.stage3": {
        **ESTIMATES_3,
        "DeepSpeedZeroOptimizer_Stage3": ENGINE["DeepSpeedOptimizer"],
        "unwrap_model_for_generation": _FUNCTIONS + "unwrap_model_for_generation",
    },
    "runtime.zero.stage_1_and_2": {
        **ESTIMATES_2,
        "DeepSpeedZeroOptimizer": ENGINE["DeepSpeedOptimizer"],
    },
    "runtime.zero.utils": {
        "is_zero_param": _FUNCTIONS + "is_zero_param",
        "ZeRORuntimeException": "errors:MegatronDSError",
    },
    "sequence.layer": {"DistributedAttention": _SEQUENCE + "DistributedAttention"},
    "utils": {
        **LOGGING,
        **LEAVES,
        "OnDevice": _FUNCTIONS + "OnDevice",
        **_each(_FUNCTIONS, "instrument_w_nvtx recursive_getattr recursive_setattr"),
    },
    "utils.bwc": _each(
        _GROUPS,
        "bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size "
        "bwc_tensor_model_parallel_group bwc_pipeline_parallel_world_size "
        "bwc_pipeline_parallel_group",
    ),
    "utils.debug": _each(_UTILS, "print_rank_0")
    | {"print_rank0": "compat.deepspeed.utils:print_rank_0"},
    "utils.logging": LOGGING,
    "utils.numa": {
        "parse_range_list": "extensions.launch.deepspeed_runner:parse_range_list"
    },
    "utils.nvtx": _each(_FUNCTIONS, "instrument_w_nvtx"),
    "utils.timer": _each(
        _TIMERS, "SynchronizedWallClockTimer ThroughputTimer NoopTimer trim_mean"
    ),
    "utils.torch": _each(_FUNCTIONS, "required_torch_version"),
    "zero": {
        "ZeroParamStatus": "compat.engine.sharded_names:ZeroParamStatus",
        **_each(
            "compat.deepspeed.tiled_linear:",
            "TiledLinear TiledLinearReturnBias split_tensor_along_last_dim",
        ),
        "ZeroParamType": _CLASSES + "ZeroParamType",
        **ESTIMATES_2,
        **ESTIMATES_3,
        "unwrap_model_for_generation": _FUNCTIONS + "unwrap_model_for_generation",
    },
}

# module → the one whose names it has
SAME: Mapping[str, str] = {
    "accelerator.abstract_accelerator": "accelerator",
    "accelerator.real_accelerator": "accelerator",
    "comm.comm": "comm",
    "comm.torch": "comm",
    "comm.reduce_op": "comm",
    "elasticity.elasticity": "elasticity",
    "elasticity.config": "elasticity",
    "monitor": "monitor.monitor",
    "ops.adam.cpu_adam": "ops.adam",
    "ops.adam.fused_adam": "ops.adam",
    "ops.lamb.fused_lamb": "ops.lamb",
    "ops.lion.cpu_lion": "ops.lion",
    "ops.lion.fused_lion": "ops.lion",
    "ops.adagrad.cpu_adagrad": "ops.adagrad",
    "ops.sparse_attention.sparsity_config": "ops.sparse_attention",
    "ops.sparse_attention.sparse_self_attention": "ops.sparse_attention",
    "ops.sparse_attention.bert_sparse_self_attention": "ops.sparse_attention",
    "ops.sparse_attention.sparse_attention_utils": "ops.sparse_attention",
    "runtime.pipe": "pipe",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.zero": "zero",
    "runtime.zero.partition_parameters": "zero",
    "runtime.zero.parameter_offload": "zero",
    "runtime.zero.tiling": "zero",
    "git_version_info": "compat.deepspeed.git_version_info",
    "utils.groups": "compat.deepspeed.groups",
    "utils.pin_memory_tracker": "compat.deepspeed.pin_memory_tracker",
    "utils.init_on_device": "utils",
    "utils.tensor_fragment": "utils",
    "utils.z3_leaf_module": "utils",
}

# `import deepspeed; deepspeed.zero.stage3`: module → the package whose modules are its attributes.
MODULES_BELOW: Mapping[str, str] = {"zero": "runtime.zero"}
