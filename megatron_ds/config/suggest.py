"""Suggestions for unknown names: from a table of other projects' names, else the most similar known name.

    >>> near_flag("--learning-rate")
    "; did you mean '--lr'?"
    >>> near_flag("--frobnicate")
    ''
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

CUTOFF = 0.75  # of difflib's ratio; below it two names share letters, not a meaning: "profile", "vocab-file"

_LENGTH = "the length of training is --train-iters, --train-samples or --train-tokens"
_RANKS = ("the launcher sets the number of processes: torchrun --nproc-per-node N. To plan without a "
          "launcher: --dry-run --world-size N")
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_DTYPE = "weights are in fp32 unless --bf16 or --fp16 is given"
_RECOMPUTE = "--recompute-granularity"
_TOKENIZER = "--tokenizer-type names the kind, --tokenizer-model or --vocab-file and --merge-file the files"

# Names of other projects, with hyphens → our flags, or a sentence where there is no such flag.
SYNONYMS: Mapping[str, str | tuple[str, ...]] = MappingProxyType({
    **dict.fromkeys(("learning-rate", "max-lr", "base-lr"), ("--lr",)),
    **dict.fromkeys(("min-learning-rate", "final-lr"), ("--min-lr",)),
    **dict.fromkeys(("output-dir", "out-dir", "save-dir", "output"), ("--save",)),
    **dict.fromkeys(("checkpoint-dir", "ckpt-dir", "checkpoint-path", "checkpoint"), ("--save", "--load")),
    **dict.fromkeys(("resume", "resume-from", "resume-from-checkpoint", "load-dir", "restore"), ("--load",)),
    **dict.fromkeys(("train-batch-size", "total-batch-size", "batch"), ("--global-batch-size",)),
    **dict.fromkeys(("per-device-train-batch-size", "train-micro-batch-size-per-gpu", "device-batch-size",
                     "mbs"),
                    ("--micro-batch-size",)),
    "gbs": ("--global-batch-size",),
    **dict.fromkeys(("accumulate-grad-batches", "gradient-accumulation", "grad-accum", "grad-accum-steps"),
                    ("--gradient-accumulation-steps",)),
    **dict.fromkeys(("epochs", "num-epochs", "max-epochs", "num-train-epochs"), "epochs are not counted: "
                                                                                f"{_LENGTH}"),
    **dict.fromkeys(("steps", "max-steps", "num-steps", "total-steps", "train-steps", "max-iters",
                     "num-iters", "iterations"),
                    ("--train-iters",)),
    **dict.fromkeys(("tokens", "max-tokens", "num-tokens", "total-tokens"), ("--train-tokens",)),
    **dict.fromkeys(("tp", "tp-size", "tensor-parallel", "tensor-parallel-size"), (_TP,)),
    **dict.fromkeys(("pp", "pp-size", "pipeline-parallel", "pipeline-parallel-size", "pipe-parallel-size"),
                    (_PP,)),
    **dict.fromkeys(("dp", "dp-size", "data-parallel", "data-parallel-size"),
                    "the data-parallel size follows: world size / (tensor- × pipeline-parallel size)"),
    **dict.fromkeys(("cp", "cp-size", "sequence-parallel-size", "ds-sequence-parallel-size"),
                    ("--context-parallel-size",)),
    **dict.fromkeys(("ep", "ep-size", "expert-parallel-size"), ("--expert-model-parallel-size",)),
    **dict.fromkeys(("gpus", "num-gpus", "ngpus", "devices", "nproc-per-node", "nnodes", "num-nodes",
                     "nodes"), _RANKS),
    **dict.fromkeys(("profile", "profiler", "profile-step-start", "profile-step-end", "use-pytorch-profiler"),
                    "there is no profiler yet; --trace DIR records the timeline of the pipeline"),
    **dict.fromkeys(("compile", "torch-compile", "jit"), "torch.compile is not used. Remove the flag"),
    **dict.fromkeys(("moe", "experts"), "mixture-of-experts models are not available yet"),
    **dict.fromkeys(("wandb", "report-to", "mlflow"), "metrics go to the log, to --tensorboard-dir and to "
                                                      "--metrics-jsonl"),
    **dict.fromkeys(("data", "dataset", "datasets", "data-dir", "dataset-path", "train-data", "train-file",
                     "corpus"),
                    ("--data-path",)),
    **dict.fromkeys(("warmup", "warmup-steps", "warmup-iters", "lr-warmup-steps", "num-warmup-steps"),
                    ("--lr-warmup-iters",)),
    **dict.fromkeys(("warmup-ratio", "warmup-fraction"), ("--lr-warmup-fraction",)),
    **dict.fromkeys(("scheduler", "lr-scheduler", "lr-scheduler-type", "lr-schedule"), ("--lr-decay-style",)),
    **dict.fromkeys(("wd", "weightdecay"), ("--weight-decay",)),
    **dict.fromkeys(("gradient-clipping", "grad-clip", "max-grad-norm", "clip-grad-norm"), ("--clip-grad",)),
    **dict.fromkeys(("layers", "n-layer", "n-layers", "num-hidden-layers", "depth"), ("--num-layers",)),
    **dict.fromkeys(("n-embd", "d-model", "dim", "width", "model-dim", "embedding-size"), ("--hidden-size",)),
    **dict.fromkeys(("n-head", "n-heads", "heads", "num-heads"), ("--num-attention-heads",)),
    **dict.fromkeys(("d-ff", "ffn-dim", "intermediate-size"), ("--ffn-hidden-size",)),
    **dict.fromkeys(("block-size", "seq-len", "sequence-length", "max-seq-len", "max-seq-length",
                     "context-length"),
                    ("--seq-length",)),
    **dict.fromkeys(("tokenizer", "tokenizer-path", "tokenizer-name"), _TOKENIZER),
    "dropout": ("--hidden-dropout", "--attention-dropout"),
    **dict.fromkeys(("precision", "dtype", "mixed-precision"), _DTYPE),
    **dict.fromkeys(("gradient-checkpointing", "activation-checkpointing", "grad-checkpointing"),
                    (_RECOMPUTE,)),
    **dict.fromkeys(("logging-steps", "log-every", "log-steps", "steps-per-print"), ("--log-interval",)),
    **dict.fromkeys(("save-steps", "save-every", "checkpoint-interval"), ("--save-interval",)),
    **dict.fromkeys(("eval-steps", "eval-every", "val-interval", "valid-interval"), ("--eval-interval",)),
    **dict.fromkeys(("tensorboard", "logging-dir", "log-dir"), ("--tensorboard-dir",)),
    **dict.fromkeys(("zero", "zero-level"), ("--zero-stage",)),
    **dict.fromkeys(("ds-config", "deepspeed-json", "deepspeed-config-file"), ("--deepspeed_config",)),
    **dict.fromkeys(("yaml", "config-file", "yaml-cfg"), ("--config",)),
    **dict.fromkeys(("flash-attn", "flash-attention"), "kernels are chosen by what the device supports"),
    **dict.fromkeys(("num-workers-per-gpu", "dataloader-num-workers", "workers"), ("--num-workers",)),
})


def near_flag(typed: str, known: Iterable[str]) -> str:
    """The text to add to `unknown flag --typed`: `; did you mean '--lr'?`, `: a sentence.`, or nothing."""
    return _near(typed.lstrip("-"), {flag.lstrip("-"): flag for flag in known}, lambda flag: flag)


def near_key(name: str, known: Mapping[str, str]) -> str:
    """`near_flag` for the key of a file. known: name with underscores → the name as the file writes it."""
    return _near(name, known, lambda flag: known.get(flag.removeprefix("--").replace("-", "_")))


def most_similar(name: str, known: Sequence[str]) -> str | None:
    """The known name with the highest ratio of difflib, ignoring case; None below the cutoff."""
    folded = {k.lower().replace("_", "-"): k for k in known}
    near = difflib.get_close_matches(name.lower().replace("_", "-"), folded, n=1, cutoff=CUTOFF)
    return folded[near[0]] if near else None


def _near(name: str, known: Mapping[str, str], written: Callable[[str], str | None]) -> str:
    """The end of a message that suggests known names similar to `name`; "" if there are none.

    known    each valid name → how it is written here
    written  from a flag of this package to how it is written here; None if it is not valid here
    """
    meant = SYNONYMS.get(name.lower().replace("_", "-"))
    if isinstance(meant, str):
        return f": {meant}."
    names = [word for flag in meant or () if (word := written(flag))]
    if not names and (similar := most_similar(name, list(known))):
        names = [known[similar]]
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""
