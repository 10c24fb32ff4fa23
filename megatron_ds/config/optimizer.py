"""`OptimizerConfig`: the update rule, the learning rate's path, and the number format of weights and gradients."""

from dataclasses import dataclass

from .option import DTYPE_NAMES, option

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


@dataclass(frozen=True)
class OptimizerConfig:
    """Spans are in iterations or in samples, as the length of training is; ramps count samples of steps not skipped."""

    optimizer: str = option("adam", help="Name of a registered optimizer: adam (decoupled weight decay), sgd.")
    lr: float = option(required=True, above=0, json="optimizer.params.lr", help="Highest learning rate.")
    min_lr: float = option(0.0, at_least=0, help="Learning rate at the end of the decay, and after it.")
    weight_decay: float = option(0.01, at_least=0, json="optimizer.params.weight_decay",
                                 help="Decay of matrices; biases and norms never decay.")
    start_weight_decay: float | None = option(None, at_least=0, help="Weight decay at the first step, if it is to change.")
    end_weight_decay: float | None = option(None, at_least=0, help="Weight decay at the last step, if it is to change.")
    weight_decay_incr_style: str = option("constant", choices=("constant", "linear", "cosine"),
                                          help="Path from --start-weight-decay to --end-weight-decay.")
    adam_beta1: float = option(0.9, at_least=0, below=1, help="Memory of Adam's first moment.")
    adam_beta2: float = option(0.999, at_least=0, below=1, help="Memory of Adam's second moment.",
                               avoid="Large batches of text usually train with 0.95.")
    adam_eps: float = option(1e-8, above=0, json="optimizer.params.eps", help="Added to the root of the second moment.")
    sgd_momentum: float = option(0.9, at_least=0, below=1, json="optimizer.params.momentum", help="Momentum (sgd only).")
    clip_grad: float = option(1.0, at_least=0, json="gradient_clipping",
                              help="Gradients are scaled down to this global norm; 0 leaves them as they are.")

    lr_decay_style: str = option(
        "linear", choices=LR_STYLES, help="Path of the learning rate after warm-up. The three Warmup… are DeepSpeed's "
        "schedulers step for step: they decay to --lr-warmup-init, and to --min-lr in WarmupCosineLR.")
    lr_decay_iters: int | None = option(None, at_least=1, unit="iterations",
                                        help="Where the decay ends. Default: at the end of training.")
    lr_decay_samples: int | None = option(None, at_least=1, unit="samples", help="The same, in samples.")
    lr_warmup_iters: int = option(0, at_least=0, unit="iterations", help="Length of the warm-up.")
    lr_warmup_samples: int = option(0, at_least=0, unit="samples", help="The same, in samples.")
    lr_warmup_fraction: float | None = option(None, at_least=0, at_most=1, help="The same, as a part of the decay span.")
    lr_warmup_init: float = option(0.0, at_least=0, help="Learning rate at the first step of the warm-up.")
    lr_warmup_style: str = option("linear", choices=("linear", "log"),
                                  help="Shape of the warm-up; log only in the Warmup… styles.")
    lr_wsd_decay_iters: int | None = option(None, at_least=1, unit="iterations",
                                            help="Length of the final decay (WSD only).")
    lr_wsd_decay_samples: int | None = option(None, at_least=1, unit="samples", help="The same, in samples.")
    lr_wsd_decay_style: str = option("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"),
                                     help="Shape of the final decay (WSD only).")

    fp16: bool = option(False, json="fp16.enabled", help="Weights and activations in fp16, fp32 masters, loss scaling.",
                        avoid="Where the device has bf16, that needs no loss scaling.")
    bf16: bool = option(False, json="bf16.enabled", help="Weights and activations in bfloat16, fp32 masters.",
                        avoid="CPUs without bf16 instructions are slower with it than with fp32.")
    loss_scale: float | None = option(None, above=0, help="Fixed loss scale (fp16 only). Default: dynamic.",
                                      avoid="A fixed scale that overflows skips every step.")
    initial_loss_scale: float = option(2.0**32, above=0, help="First dynamic loss scale (fp16 only).")
    min_loss_scale: float = option(1.0, above=0, json="fp16.min_loss_scale",
                                   help="Below this dynamic loss scale training gives up (fp16 only).")
    loss_scale_window: int = option(1000, at_least=1, json="fp16.loss_scale_window", unit="iterations",
                                    help="Steps without overflow after which the scale doubles (fp16 only).")
    hysteresis: int = option(2, at_least=1, json="fp16.hysteresis",
                             help="Overflows after which the scale is halved (fp16 only).")

    main_grads_dtype: str = option(
        "fp32", choices=("fp32", "bf16", "fp16"), json="data_types.grad_accum_dtype",
        help="Gradients accumulate in it, and travel in it unless --communication-data-type says another; bf16 and fp16 only "
        "where the weights are.",
        avoid="16 bits lose small contributions when many micro-batches or ranks add up.")

    @property
    def gradient_dtype(self) -> str:
        return DTYPE_NAMES[self.main_grads_dtype]

    @property
    def params_dtype(self) -> str:
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"
