"""Options of training: optimizer, run, checkpoints, and `PlanConfig` for a dry run."""

from dataclasses import dataclass

from ...features import own_features
from .cycle import ONE_CYCLE, RANGE_TEST
from .need import need
from .option import DTYPE_NAMES, added_options, option

# DeepSpeed's schedulers, which count steps.
DEEPSPEED_STYLES = (
    "WarmupLR",
    "WarmupDecayLR",
    "WarmupCosineLR",
    ONE_CYCLE,
    RANGE_TEST,
)
LR_STYLES = (
    "constant",
    "linear",
    "cosine",
    "inverse-square-root",
    "WSD",
    *DEEPSPEED_STYLES,
)


# Names of learning rates: that of most parameters, and that of word embeddings and output layers if they
# have their own.
MAIN_RATE = "main"
DECOUPLED_RATE = "decoupled"


OPTIMIZERS = (
    "sgd",
    *(name for feature in own_features() for name in feature.optimizers),
)


@dataclass(frozen=True)
class OptimizerConfig(
    *added_options("optimizer"),  # type: ignore[misc]  # base classes are found at run time
):
    """Options of the optimizer and its schedules. Lengths are in iterations, samples or tokens; those in
    iterations and samples do not count skipped steps.
    """

    optimizer: str = option(
        "adam",
        help="Name of a registered optimizer: adam (decoupled weight decay), "
        f"{', '.join(OPTIMIZERS)} (docs/scale/optimizers.md).",
    )
    lr: float = option(
        required=True,
        above=0,
        json="optimizer.params.lr",
        flags=["--cycle-max-lr"],
        help="Highest learning rate; LRRangeTest begins with it.",
    )
    min_lr: float = option(
        0.0,
        at_least=0,
        flags=["--cycle-min-lr"],
        help="Learning rate at the end of the decay and after it; with OneCycle also at the beginning.",
    )
    decoupled_lr: float | None = option(
        None,
        above=0,
        help="Highest learning rate of the word embedding and the output layer, if they have "
        "their own; warm-up and decay are those of --lr.",
        avoid="Tied weights count as the embedding.",
    )
    decoupled_min_lr: float | None = option(
        None,
        at_least=0,
        needs=need("optimizer.decoupled_lr"),
        help="Learning rate of --decoupled-lr at the end of the decay. Default: --min-lr.",
    )
    weight_decay: float = option(
        0.01,
        at_least=0,
        json="optimizer.params.weight_decay",
        help="Weight decay of matrices; biases and normalization weights never decay.",
    )
    start_weight_decay: float | None = option(
        None,
        at_least=0,
        needs=need("optimizer.weight_decay_incr_style", "linear", "cosine"),
        help="Weight decay at the first step, if it changes.",
    )
    end_weight_decay: float | None = option(
        None,
        at_least=0,
        needs=need("optimizer.weight_decay_incr_style", "linear", "cosine"),
        help="Weight decay at the last step, if it changes.",
    )
    weight_decay_incr_style: str = option(
        "constant",
        choices=("constant", "linear", "cosine"),
        help="How the weight decay changes from --start-weight-decay to --end-weight-decay.",
    )
    adam_beta1: float = option(
        0.9, at_least=0, below=1, help="Decay rate of the first moment (adam, lamb)."
    )
    adam_beta2: float = option(
        0.999,
        at_least=0,
        below=1,
        help="Decay rate of the second moment (adam, lamb).",
        avoid="Large language models usually train with 0.95.",
    )
    adam_eps: float = option(
        1e-8,
        above=0,
        help="Added to the square root of the second moment (adam, lamb).",
    )
    adam_bias_correction: bool = option(
        True,
        json="optimizer.params.bias_correction",
        help="Divide the moments by 1 - beta^step, so that the first ones are not too small (adam, lamb).",
        avoid="Without it, the first steps are larger: a warm-up of thousands of steps must hide them.",
    )
    adam_amsgrad: bool = option(
        False,
        flag="--amsgrad",
        json="optimizer.params.amsgrad",
        help="Divide by the largest second moment so far (adam only).",
        avoid="It keeps a third tensor of state, and rarely helps.",
    )
    decoupled_weight_decay: bool = option(
        True,
        json="optimizer.params.adam_w_mode",
        help="Weight decay lowers the weights by themselves (AdamW). Off: it is added to the gradient, and "
        "passes through Adam's moments (adam only).",
        avoid="AdamW generalises better.",
    )
    sgd_momentum: float = option(0.9, at_least=0, below=1, help="Momentum (sgd only).")
    param_groups: tuple[str, ...] = option(
        (),
        flag="--param-group",
        repeats=True,
        unit="pattern:key=value",
        json="optimizer.param_groups",
        help="Parameters whose names match the pattern (* is any text) have another optimizer=NAME, "
        "lr_factor=X, decay=on|off or init_factor=X (docs/scale/optimizers.md). "
        "May be given several times.",
        avoid="--decoupled-lr is simpler for embedding and output layer.",
    )
    clip_grad: float = option(
        1.0,
        at_least=0,
        json="gradient_clipping",
        help="Gradients are scaled down to this global norm; 0: no clipping.",
    )

    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        flag="--use-checkpoint-opt-param-scheduler",
        help="Take the schedules of learning rate and weight decay from the checkpoint of --load, not from "
        "the flags.",
        avoid="Flags of the schedules then have no effect after the first start.",
    )
    lr_decay_style: str = option(
        "linear",
        choices=LR_STYLES,
        flags=["--lr-schedule"],
        help="How the learning rate decays after the warm-up. The last five styles are DeepSpeed's "
        "schedulers: WarmupDecayLR decays to --lr-warmup-init, WarmupCosineLR to --min-lr; OneCycle and "
        "LRRangeTest have options of their own.",
    )
    lr_decay_iters: int | None = option(
        None,
        at_least=1,
        unit="iterations",
        help="Iteration at which the decay ends. Default: the end of training.",
    )
    lr_decay_samples: int | None = option(
        None,
        at_least=1,
        unit="samples",
        help="Consumed samples at which the decay ends.",
    )
    lr_decay_tokens: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        help="Consumed tokens at which the decay ends; the warm-up is then in tokens, too. Only "
        "tokens that were trained on count, where sequences are shortened.",
    )
    lr_warmup_iters: int = option(
        0, at_least=0, unit="iterations", help="Length of the warm-up."
    )
    lr_warmup_samples: int = option(
        0, at_least=0, unit="samples", help="Length of the warm-up in samples."
    )
    lr_warmup_tokens: int = option(
        0,
        at_least=0,
        unit="tokens",
        help="Length of the warm-up in consumed tokens, with --lr-decay-tokens or --train-tokens.",
    )
    lr_warmup_fraction: float | None = option(
        None,
        at_least=0,
        at_most=1,
        help="Length of the warm-up as a fraction of the decay span.",
    )
    lr_warmup_init: float = option(
        0.0, at_least=0, help="Learning rate at the first step of the warm-up."
    )
    lr_warmup_style: str = option(
        "linear",
        choices=("linear", "linear_from_one", "log"),
        help="Shape of the warm-up. linear_from_one: the first step has the rate of the second, not 0, as in "
        "GPT-NeoX; log only with the Warmup… styles.",
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        at_least=1,
        unit="iterations",
        needs=need("optimizer.lr_decay_style", "WSD"),
        help="Length of the final decay (WSD only).",
    )
    lr_wsd_decay_samples: int | None = option(
        None,
        at_least=1,
        unit="samples",
        needs=need("optimizer.lr_decay_style", "WSD"),
        help="Length of the final decay in samples (WSD only).",
    )
    lr_wsd_decay_style: str = option(
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        values={"1-sqrt": "minus_sqrt"},
        help="Shape of the final decay (WSD only).",
    )

    fp16: bool = option(
        False,
        json="fp16.enabled",
        help="Weights and activations in fp16, fp32 masters, loss scaling.",
        avoid="Prefer --bf16, which needs no loss scaling, where the device supports it.",
    )
    bf16: bool = option(
        False,
        json="bf16.enabled",
        help="Weights and activations in bfloat16, fp32 masters.",
        avoid="CPUs without bf16 instructions are slower in bf16 than in fp32.",
    )
    loss_scale: float | None = option(
        None,
        above=0,
        help="Fixed loss scale (fp16 only). Default: dynamic. A loss is divided by the number n of data-parallel "
        "ranks before backward: n times the scale of DeepSpeed or Megatron gives gradients of the same size.",
        avoid="A fixed scale that overflows skips every step.",
    )
    initial_loss_scale: float = option(
        2.0**32, above=0, help="First dynamic loss scale (fp16 only)."
    )
    min_loss_scale: float = option(
        1.0,
        above=0,
        json="fp16.min_loss_scale",
        help="Training stops with an error if the dynamic loss scale would fall below this (fp16 only).",
    )
    loss_scale_window: int = option(
        1000,
        at_least=1,
        json="fp16.loss_scale_window",
        unit="iterations",
        help="Steps without overflow after which the scale doubles (fp16 only).",
    )
    hysteresis: int = option(
        2,
        at_least=1,
        json="fp16.hysteresis",
        help="Overflows after which the scale is halved (fp16 only).",
    )
    consecutive_hysteresis: bool = option(
        False,
        json="fp16.consecutive_hysteresis",
        help="Only overflows in consecutive steps count for --hysteresis (fp16 only).",
    )
    fp16_auto_cast: bool = option(
        False,
        json="fp16.auto_cast",
        help="An engine casts floating-point inputs of its module to fp16 (fp16 only). Training scripts have "
        "none.",
    )
    main_grads_dtype: str = option(
        "fp32",
        choices=("fp32", "bf16", "fp16"),
        json="data_types.grad_accum_dtype",
        switches={
            "--accumulate-allreduce-grads-in-fp32": "fp32",
            "--grad-reduce-in-bf16": "bf16",
        },
        help="Dtype in which gradients accumulate, and in which they are reduced unless "
        "--communication-data-type is given. It is fp32 or the dtype of the weights.",
        avoid="16 bits lose small contributions when many micro-batches or ranks are added up.",
    )

    @property
    def gradient_dtype(self) -> str:
        """Dtype in which gradients accumulate, as torch names it."""
        return DTYPE_NAMES[self.main_grads_dtype]

    @property
    def params_dtype(self) -> str:
        """Dtype of weights and activations, as torch names it."""
        if self.fp16:
            return "float16"
        return "bfloat16" if self.bf16 else "float32"


@dataclass(frozen=True)
class TrainConfig(
    *added_options("train"),  # type: ignore[misc]  # base classes are found at run time
):
    """Batch, length, evaluation, ways to end, recomputation.

    After parsing, micro_batch_size and global_batch_size are numbers, and gradient_accumulation_steps is
    None: it is only another way to give the global batch, which does not change when the run continues with
    more or fewer ranks.
    """

    micro_batch_size: int = option(
        required=True,
        at_least=1,
        flags=["--batch-size"],
        json="train_micro_batch_size_per_gpu",
        unit="samples",
        help="Samples of one forward and backward pass on one data-parallel rank.",
    )
    global_batch_size: int = option(
        None,
        at_least=1,
        json="train_batch_size",
        unit="samples",
        help="Samples of one optimizer step over all ranks. Default: micro-batch × data-parallel size.",
    )
    gradient_accumulation_steps: int | None = option(
        None,
        at_least=1,
        json="gradient_accumulation_steps",
        unit="micro-batches",
        help="Micro-batches of one step, instead of --global-batch-size.",
        avoid="Prefer --global-batch-size, which means the same on any number of ranks.",
    )
    rampup_batch_size: tuple[int, ...] | None = option(
        None,
        count=3,
        at_least=0,
        help="START INCREMENT SAMPLES: the global batch begins at START and grows by INCREMENT until it "
        "reaches the global batch size after SAMPLES samples. Needs --train-samples or --train-tokens.",
    )
    step_batch_size_schedule: tuple[str, ...] = option(
        (),
        help="TOKENS:SIZE …: the global batch has SIZE samples once TOKENS tokens are consumed, such as "
        "0:256 2B:512 (K, M, B and T are powers of a thousand). The last is the global batch size. "
        "Needs --train-samples or --train-tokens.",
    )
    decrease_batch_size_if_needed: bool = option(
        False,
        help="Round a global batch down to a multiple of micro-batch × data-parallel size.",
        avoid="The result then depends on the layout: another number of ranks trains on other batches.",
    )
    train_iters: int | None = option(
        None,
        at_least=0,
        unit="iterations",
        help="Length of training in iterations. 0 only evaluates.",
    )
    train_samples: int | None = option(
        None,
        at_least=1,
        unit="samples",
        help="Length of training in samples, instead of --train-iters.",
    )
    train_tokens: int | None = option(
        None,
        at_least=1,
        unit="tokens",
        help="Length of training in tokens: the run ends with the step that reaches it. --train-iters or "
        "--train-samples, if also given, is an upper bound. Shortened and dropped tokens do not count.",
    )
    eval_iters: int = option(
        100,
        at_least=0,
        values={"-1": 0},
        unit="iterations",
        help="Batches of one evaluation; 0 turns evaluation off.",
    )
    eval_global_batch_size: int | None = option(
        None,
        at_least=1,
        unit="samples",
        help="Samples of a batch of an evaluation. Only the global batch size, the default, is accepted.",
    )
    eval_interval: int = option(
        1000, at_least=1, unit="iterations", help="Steps between evaluations."
    )
    exit_interval: int | None = option(
        None,
        at_least=1,
        unit="iterations",
        help="Save and exit at the next step that is a multiple of this.",
    )
    exit_duration_in_mins: float | None = option(
        None, above=0, unit="minutes", help="Save and exit after this many minutes."
    )
    skip_train: bool = option(
        False,
        help="Only evaluate the weights of --load, on the validation and the test data: no step, no "
        "checkpoint. Options of the learning rate have no effect.",
        avoid="Optimizer state is allocated all the same; --zero-stage splits it.",
    )
    kill_switch_path: str | None = option(
        None,
        flags=["--kill-switch-file"],
        help="Save and exit when this file exists. Rank 0 looks for it at each step.",
        avoid="A signal needs no file: SIGTERM and SIGUSR1 save and exit, too.",
    )
    trigger_path: str | None = option(
        None,
        help="Folder in which a file named `exit` makes the run save and exit, as --kill-switch-path does; a "
        "file named `save` makes it save and go on, and is removed.",
        avoid="A signal needs no file: SIGTERM and SIGUSR1 save and exit, too.",
    )
    seed: int = option(
        1234, at_least=0, help="Seed of initial weights, data order and dropout."
    )
    recompute_granularity: str | None = option(
        None,
        choices=("full", "selective"),
        flags=["--activations-checkpoint-granularity"],
        switches={
            "--recompute-activations": "selective",
            "--checkpoint-activations": "full",
        },
        help="Recompute activations in the backward pass instead of keeping them: of whole layers (full), "
        "or only of core attention (selective).",
        avoid="full takes about a third more time; use it only when memory runs out.",
    )
    recompute_method: str | None = option(
        None,
        choices=("uniform", "block"),
        flags=["--activations-checkpoint-method"],
        needs=need("train.recompute_granularity", "full"),
        help="Which layers are fully recomputed: all (uniform) or the first --recompute-num-layers of each "
        "stage (block). Default: block if that number is given.",
    )
    recompute_num_layers: int | None = option(
        None,
        at_least=1,
        flags=["--activations-checkpoint-num-layers"],
        needs=need("train.recompute_granularity", "full"),
        help="Layers of each stage that are recomputed. Default: all.",
    )
    checkpoint_in_cpu: bool = option(
        False,
        json="activation_checkpointing.cpu_checkpointing",
        needs=need("train.recompute_granularity", "full"),
        help="Inputs of fully recomputed layers wait in host memory for their backward. The copies run "
        "beside the model. On a CPU they are there already.",
        avoid="A layer must compute longer than its input is copied: s·b·h elements each way.",
    )
    distribute_saved_activations: bool = option(
        False,
        switches={
            "--distribute-checkpointed-activations": True,
            "--partition-activations": True,
        },
        json="activation_checkpointing.partition_activations",
        needs=need("train.recompute_granularity", "full"),
        help="Each tensor-parallel rank keeps its part of the inputs of fully recomputed layers, which are "
        "gathered in backward. With --sequence-parallel they are divided in any case.",
        avoid="--sequence-parallel divides more activations, for fewer bytes sent.",
    )
    cross_entropy_chunks: int = option(
        1,
        at_least=0,
        switches={"--tiled-logits": 0},
        help="Compute the output head and the loss for this many parts of a micro-batch, one after another, "
        "so that the logits of all its tokens never exist at once. 0 (--tiled-logits): as many that the "
        "logits of a part are not larger than the hidden states that the head reads.",
        avoid="The head's forward runs twice; use it where the logits, tokens × vocabulary, decide the "
        "memory.",
    )
    tiled_mlp: int = option(
        1,
        at_least=0,
        alone=0,
        switches={"--no-tiled-mlp": 1},
        unit="tiles",
        help="Apply the feed-forward of each block to this many tiles of the sequence, one after another; "
        "backward computes each tile again. Without a number: tiles of as many tokens as the hidden "
        "size. What the feed-forward keeps then exists for one tile at a time.",
        avoid="The feed-forward's forward runs twice; use it for sequences much longer than the hidden "
        "size.",
    )
    label_smoothing: float = option(
        0.0,
        at_least=0,
        below=1,
        help="Share of the target that is spread evenly over the rest of the vocabulary.",
    )
    check_for_nan: str = option(
        "stop",
        choices=("stop", "continue"),
        flag="--check-for-nan",
        switches={
            "--check-for-nan-in-loss-and-grad": "stop",
            "--no-check-for-nan-in-loss-and-grad": "continue",
            "--no-check-for-nan-in-loss": "continue",
        },
        help="What to do when the loss is not finite. It is printed, counted and located in both cases.",
        avoid="A run that continues rarely recovers.",
    )
    calculate_per_token_loss: bool = option(
        False,
        help="Give all tokens of a global batch the same weight, instead of all its micro-batches.",
        avoid="It only matters if micro-batches have different numbers of unmasked tokens.",
    )
    deterministic_mode: bool = option(
        False,
        help="Use only operations whose result is the same in every run, on the same layout; an operation "
        "that has none raises an error. On GPUs torch then chooses backwards of attention that add in a fixed "
        "order; without it those of cuDNN and FlashAttention add the parts of a gradient as they come.",
        avoid="On GPUs some operations are then slower; CPUs are deterministic anyway.",
    )
    kernels: str = option(
        "auto",
        choices=("auto", "torch"),
        help="Implementations of the operations of a layer: the fastest that takes the arguments, or those "
        "in torch's operations alone.",
        avoid="torch is slower; it shows whether a difference comes from a kernel of this package.",
    )
    bias_gelu_fusion: bool = option(
        True,
        help="In Megatron the GELU that is fused with a bias is the tanh approximation and the other "
        "one exact: --no-bias-gelu-fusion makes --activation gelu_exact the default, as "
        "--disable-bias-linear does.",
        avoid="It chooses the activation, not an implementation: write --activation.",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint loads at any layout of the same model."""

    save: str | None = option(
        None,
        help="Directory for checkpoints, or a place in a store, such as s3://bucket/run or gs://bucket/run. "
        "Default: none are written.",
    )
    load: str | None = option(
        None,
        help="Directory to resume from, or a place in a store. When it is also --save and holds no checkpoint yet, "
        "training starts from scratch; otherwise a directory without a checkpoint is an error.",
    )
    pretrained_checkpoint: str | None = option(
        None,
        help="Directory of weights to start from, at the first step, where --load has no checkpoint: the same command "
        "then continues the run's own. Where others are trained beside them, the "
        "frozen weights of every start.",
    )
    load_format: str | None = option(
        None,
        help="Format of the checkpoint in --load, such as huggingface. Default: detected.",
    )
    qkv_packing: str | None = option(
        None,
        choices=("heads", "thirds"),
        help="Order of the rows of query_key_value in a checkpoint of Megatron-DeepSpeed in --load, which "
        "does not record it.",
    )
    overwrite_save: bool = option(
        False,
        needs=need("checkpoint.save"),
        help="If --save holds another run, move that run into a subfolder replaced-RUN_ID-TIME and start "
        "here.",
        avoid="A script that restarts by itself would start from scratch each time: use --load there.",
    )
    save_interval: int | None = option(
        None,
        at_least=1,
        unit="iterations",
        help="Steps between checkpoints. Default: one checkpoint at the end of training.",
    )
    save_total_limit: int | None = option(
        None, at_least=1, help="Keep only the newest N checkpoints. Default: all."
    )
    save_retain_interval: int | None = option(
        None,
        at_least=1,
        unit="iterations",
        help="Delete each checkpoint when the next one is complete, unless its step is a multiple of this. "
        "Default: keep all.",
    )
    extra_save_iters: tuple[int, ...] = option(
        (),
        at_least=0,
        unit="iterations",
        help="Iterations after which a checkpoint is saved besides those of --save-interval; 0 is before the "
        "first step.",
    )
    async_save: bool = option(
        False,
        help="Write checkpoints while training goes on: the state is copied into host memory beside the next forward "
        "and backward, and the update waits for the copy, which is as large as the rank's part of a checkpoint. A "
        "checkpoint is visible when it is complete; one is under way at a time.",
    )
    no_save_optim: bool = option(
        False,
        help="Write weights only.",
        avoid="Training cannot resume from such a checkpoint.",
    )
    no_load_optim: bool = option(
        False, help="Load weights only; the optimizer starts with empty state."
    )
    finetune: bool = option(
        False,
        help="Load weights only, and start at the first step and the first sample.",
    )
    use_checkpoint_args: bool = option(
        False,
        help="An error if the checkpoint of --load has no options of a model and a tokenizer. Where it has, "
        "they hold unless a flag or a file gives others, also without this flag.",
    )
    exit_on_missing_checkpoint: bool = option(
        False,
        needs=need("checkpoint.load"),
        help="Exit with an error if --load holds no checkpoint, also when it is --save.",
        avoid="Leave it off in a script that starts and resumes with the same command.",
    )


@dataclass(frozen=True)
class PlanConfig:
    """`--dry-run` needs no GPU, no other process and no data, and writes nothing."""

    dry_run: str = option(
        "off",
        per_host=True,
        choices=("off", "cuda", "cpu"),
        alone="cuda",
        switches={"--no-dry-run": "off"},
        help="Print the plan and exit: layout, schedule, memory and traffic of a rank, FLOPs; or the errors "
        "of a launch. cuda, cpu: the kind of device to plan for. The flag without a value means cuda.",
    )
    world_size: int | None = option(
        None,
        at_least=1,
        unit="ranks",
        help="Number of ranks to plan for (--dry-run only). Default: the launcher's, else 1.",
        avoid="In real runs the launcher sets it.",
    )
    rank: int = option(
        0,
        per_host=True,
        at_least=0,
        help="The rank whose memory and traffic are printed (--dry-run only).",
        avoid="In real runs the launcher sets it.",
    )

    device_memory: str | None = option(
        None,
        help="Memory of each device, such as 80GB or 80GiB (--dry-run only). The plan states whether the "
        "rank with the highest peak fits, and what would help; the exit code is 1 if it does not fit. "
        "Default: that of this machine's GPU, if there is one.",
        avoid="In real runs the device itself has it.",
    )

    @property
    def is_dry(self) -> bool:
        """Whether a plan is printed instead of a run."""
        return self.dry_run != "off"
