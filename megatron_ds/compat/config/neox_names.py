"""Keys of GPT-NeoX's YAML: tables of key → flag here, or why a key changes nothing. Keys with underscores."""

from types import MappingProxyType

# Keys whose value is that of a flag.
VALUES = MappingProxyType(
    {
        "attention_dropout": "--attention-dropout",
        "checkpoint_factor": "--save-interval",
        "comet_experiment_name": "--comet-experiment-name",
        "comet_project": "--comet-project",
        "comet_workspace": "--comet-workspace",
        "data_path": "--data-path",
        "eval_interval": "--eval-interval",
        "eval_iters": "--eval-iters",
        "exit_interval": "--exit-interval",
        "extra_save_iters": "--extra-save-iters",
        "hidden_dropout": "--hidden-dropout",
        "hidden_size": "--hidden-size",
        "keep_last_n_checkpoints": "--save-total-limit",
        "load": "--load",
        "log_interval": "--log-interval",
        "lr_decay_iters": "--lr-decay-iters",
        "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by",
        "max_position_embeddings": "--max-position-embeddings",
        "merge_file": "--merge-file",
        "min_lr": "--min-lr",
        "model_parallel_size": "--tensor-model-parallel-size",
        "num_attention_heads": "--num-attention-heads",
        "num_kv_heads": "--num-query-groups",
        "num_layers": "--num-layers",
        "num_workers": "--num-workers",
        "rotary_emb_base": "--rotary-base",
        "rotary_pct": "--rotary-percent",
        "save": "--save",
        "save_interval": "--save-interval",
        "seed": "--seed",
        "seq_length": "--seq-length",
        "split": "--split",
        "tensorboard_dir": "--tensorboard-dir",
        "train_iters": "--train-iters",
        "warmup": "--lr-warmup-fraction",
        "wandb_group": "--wandb-group",
        "wandb_project": "--wandb-project",
        "wandb_run_name": "--wandb-exp-name",
        "wandb_team": "--wandb-entity",
        "weight_decay": "--weight-decay",
    }
)

# Keys that are true or false → the flag for true.
SWITCHES = MappingProxyType(
    {
        "eod_mask_loss": "--eod-mask-loss",
        "finetune": "--finetune",
        "gpt_j_residual": "--use-parallel-residual",
        "gpt_j_tied": "--shared-block-norm",
        "no_load_optim": "--no-load-optim",
        "no_save_optim": "--no-save-optim",
        "no_weight_tying": "--untie-embeddings-and-output-weights",
        "sequence_parallel": "--sequence-parallel",
    }
)

# Keys that DeepSpeed reads.
OF_DEEPSPEED = frozenset(
    (
        "bf16",
        "communication_data_type",
        "data_types",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "zero_optimization",
    )
)

# What GPT-NeoX takes where no file has the key, if it is not the default here.
DEFAULTS = MappingProxyType(
    {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "weight_decay": 0.1,
        "warmup": 0.01,
        "eval_iters": 100,
        "pos_emb": "learned",
    }
)

_WHY = {
    "kernels are chosen by what the device supports": "apply_query_key_layer_scaling attention_softmax_in_fp32 bias_dropout_fusion layernorm_fusion "
    "onnx_safe rmsnorm_fusion rope_fusion scaled_masked_softmax_fusion "
    "scaled_upper_triang_masked_softmax_fusion fused_kernels_build_path use_flashattn_swiglu",
    "it is NCCL on CUDA devices and gloo on CPUs": "distributed_backend",
    "the launcher is recognised from the environment": "deepspeed_extra_args deepspeed_mpi deepspeed_slurm global_num_gpus hostfile launcher master_addr "
    "master_port num_gpus user_script",
    "memory only: what is kept or recomputed changes no number": "checkpoint_num_layers contiguous_checkpointing deepspeed_activation_checkpointing "
    "partition_activations profile_backward synchronize_each_layer checkpoint_in_cpu",
    "there is one output layer, split over the vocabulary": "output_layer_parallelism",
    "--log-interval sets how often a line is logged": "steps_per_print",
    "DeepSpeed has no such key": "cuda_visible_devices",
    "gradients accumulate and are reduced in fp32": "fp32_allreduce",
    "data files are memory-mapped .bin/.idx files": "data_impl mmap_warmup use_shared_fs",
    "W&B is on if there is a project": "use_wandb wandb_host wandb_init_all_ranks",
    "Comet is on if there is a project": "use_comet comet_experiment comet_others comet_tags",
    "the log goes to stdout": "log_dir",
    "a checkpoint is compared by its checksums": "checkpoint_validation_with_forward_pass",
    "a checkpoint holds no random state": "no_load_rng no_save_rng",
    "layers are cut into stages of equal numbers": "pipe_partition_method",
    "the learning rate always follows from the configuration and from progress": "override_lr_scheduler use_checkpoint_lr_scheduler",
    "always logged": "log_grad_norm",
    "initial weights follow from the seed and each weight's name": "use_cpu_initialization",
    "DeepSpeed's search of settings is not made": "autotuning_run",
    "it concerns services of one company's clusters": "adlr_autoresume adlr_autoresume_interval",
    "the entry script is for generation": "text_gen_type maximum_tokens num_samples prompt_end recompute "
    "sample_input_file sample_output_file temperature top_k top_p",
}
WITHOUT_EFFECT = MappingProxyType(
    {key: why for why, keys in _WHY.items() for key in keys.split()}
)

# Keys with one or two values that change nothing → (those values, why another is refused).
ONLY = MappingProxyType(
    {
        "activation": (
            ("gelu",),
            "the activation is gelu; gated and other ones have other sizes there",
        ),
        "attention_config": (
            (),
            "every layer has softmax attention over all earlier tokens",
        ),
        "checkpoint_scale": (
            ("linear",),
            "checkpoints have one interval; extra_save_iters lists others",
        ),
        "dataset_impl": (("gpt2",), "samples are runs of tokens"),
        "gas": ((1,), "gradient_accumulation_steps sets the micro-batches of a step"),
        "pack_impl": (("packed",), "samples are runs of tokens"),
        "norm": (("layernorm", "rmsnorm"), "norms are LayerNorm or RMSNorm"),
        "train_impl": (("normal",), "the loss is that of the next token"),
        "use_mup": (
            (False,),
            "write learning rates that follow the width as param_groups",
        ),
        "use_qk_layernorm": ((False,), "norms of queries and keys are per head"),
        "allow_chopped": ((True,), "samples are runs of tokens"),
    }
)

POSITIONS = MappingProxyType(
    {"learned": "learned_absolute", "rotary": "rope", "alibi": "alibi", "none": "none"}
)
TOKENIZERS = MappingProxyType(
    {
        "GPT2BPETokenizer": ("GPT2BPETokenizer", "--vocab-file"),
        "HFTokenizer": ("HuggingFaceTokenizer", "--tokenizer-model"),
    }
)
# A file is GPT-NeoX's if it has two of these.
MARKS = frozenset(
    (
        "attention_config",
        "checkpoint_factor",
        "gpt_j_residual",
        "model_parallel_size",
        "no_weight_tying",
        "output_layer_parallelism",
        "pipe_parallel_size",
        "pos_emb",
        "rotary_pct",
        "scaled_upper_triang_masked_softmax_fusion",
        "synchronize_each_layer",
        "train_micro_batch_size_per_gpu",
    )
)
# Distributions of initial weights.
INITIAL = ("normal", "scaled_normal", "small_init", "wang_init")


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value < 1e9
    )


_TEXT = ("a text", lambda value: isinstance(value, str))
_BLOCK = ("a block of keys", lambda value: isinstance(value, dict))
# Keys that are read with others → (the type of their value, whether a value has it). Other keys have the
# type of their flag.
TYPES = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "init_method",
                "lr_decay_style",
                "norm",
                "output_layer_init_method",
                "pos_emb",
                "precision",
                "tokenizer_type",
                "vocab_file",
            ),
            _TEXT,
        ),
        **dict.fromkeys(
            ("bf16", "data_types", "fp16", "optimizer", "zero_optimization"), _BLOCK
        ),
        "init_method_std": ("a number above 0", _is_positive),
    }
)
