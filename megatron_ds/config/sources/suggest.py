"""Suggestions for unknown names: from a table of other projects' names, else the most similar known name.

>>> near_flag("--learning-rate")
"; did you mean '--lr'?"
>>> near_flag("--frobnicate")
''
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from ...features import features, per_features

CUTOFF = 0.75  # of difflib's ratio; below it two names share letters, not a meaning: "profile", "vocab-file"

# Our flags, or a sentence where there is no such flag → names of other projects that mean them, with hyphens.
_FLAGS = {
    "--lr": "learning-rate max-lr base-lr",
    "--min-lr": "min-learning-rate final-lr",
    "--save": "output-dir out-dir save-dir output",
    "--save --load": "checkpoint-dir ckpt-dir checkpoint-path checkpoint",
    "--load": "resume resume-from resume-from-checkpoint load-dir restore",
    "--global-batch-size": "train-batch-size total-batch-size batch gbs",
    "--micro-batch-size": "per-device-train-batch-size train-micro-batch-size-per-gpu device-batch-size mbs",
    "--gradient-accumulation-steps": "accumulate-grad-batches gradient-accumulation grad-accum grad-accum-steps",
    "--train-iters": "steps max-steps num-steps total-steps train-steps max-iters num-iters iterations",
    "--train-tokens": "tokens max-tokens num-tokens total-tokens",
    "--tensor-model-parallel-size": "tp tp-size tensor-parallel tensor-parallel-size",
    "--pipeline-model-parallel-size": "pp pp-size pipeline-parallel pipeline-parallel-size pipe-parallel-size",
    "--context-parallel-size": "cp cp-size sequence-parallel-size",
    "--num-experts": "moe experts n-experts num-moe-experts num-local-experts n-routed-experts num-routed-experts",
    "--moe-router-topk": "top-k num-experts-per-tok num-experts-per-token experts-per-token moe-topk moe-k",
    "--moe-ffn-hidden-size": "expert-hidden-size expert-ffn-hidden-size",
    "--moe-shared-expert-intermediate-size": "shared-expert-intermediate-size",
    "--moe-layer-freq": "decoder-sparse-step moe-every moe-layers",
    "--moe-router-num-groups": "num-expert-groups",
    "--moe-router-group-topk": "num-limited-groups",
    "--moe-router-score-function": "scoring-func score-func",
    "--moe-router-topk-scaling-factor": "route-scale",
    "--moe-aux-loss-coeff": "router-aux-loss-coef aux-loss-coef aux-loss-alpha load-balance-coeff",
    "--moe-z-loss-coeff": "router-z-loss-coef z-loss-coeff moe-zloss-weight",
    "--moe-expert-capacity-factor": "capacity-factor expert-capacity-factor",
    "--moe-eval-capacity-factor": "eval-capacity-factor",
    "--moe-min-capacity": "min-capacity",
    "--moe-router-noise": "noisy-gate-policy",
    "--moe-input-jitter-eps": "router-jitter-noise input-jitter moe-router-jitter",
    "--expert-model-parallel-size": "ep ep-size expert-parallel-size",
    "--data-path": "data datasets data-dir dataset-path train-data train-file corpus",
    "--lr-warmup-iters": "warmup warmup-steps warmup-iters lr-warmup-steps num-warmup-steps",
    "--lr-warmup-fraction": "warmup-ratio warmup-fraction",
    "--lr-decay-style": "scheduler lr-scheduler lr-scheduler-type",
    "--weight-decay": "wd weightdecay",
    "--clip-grad": "gradient-clipping grad-clip max-grad-norm clip-grad-norm",
    "--num-layers": "layers n-layer n-layers num-hidden-layers depth",
    "--hidden-size": "n-embd d-model dim width model-dim embedding-size",
    "--num-attention-heads": "n-head n-heads heads num-heads",
    "--ffn-hidden-size": "d-ff ffn-dim",
    "--seq-length": "block-size seq-len sequence-length max-seq-len max-seq-length context-length",
    "--hidden-dropout --attention-dropout": "dropout",
    "--recompute-granularity": "gradient-checkpointing activation-checkpointing grad-checkpointing",
    "--log-interval": "logging-steps log-every log-steps steps-per-print",
    "--save-interval": "save-steps save-every checkpoint-interval",
    "--eval-interval": "eval-steps eval-every val-interval valid-interval",
    "--tensorboard-dir": "tensorboard logging-dir log-dir",
    "--zero-stage": "zero zero-level",
    "--deepspeed_config": "ds-config deepspeed-json deepspeed-config-file",
    "--config": "yaml config-file yaml-cfg",
    "--num-workers": "num-workers-per-gpu dataloader-num-workers workers",
}
_SENTENCES = {
    "--moe-shared-expert-intermediate-size is the width of all shared experts together": "num-shared-experts",
    "the weights of a token's experts sum to 1 by default; --moe-router-pre-softmax leaves them as they are": "route-norm",
    "epochs are not counted: the length of training is --train-iters, --train-samples or --train-tokens": "epochs num-epochs max-epochs num-train-epochs",
    "the data-parallel size follows: world size / (tensor- × pipeline-parallel size)": "dp dp-size data-parallel data-parallel-size",
    "the launcher sets the number of processes: torchrun --nproc-per-node N. To plan without a launcher: "
    "--dry-run --world-size N": "gpus num-gpus ngpus devices nproc-per-node nnodes num-nodes nodes",
    "torch.compile is not used. Remove the flag": "compile torch-compile jit",
    "--tokenizer-type names the kind, --tokenizer-model or --vocab-file and --merge-file the files": "tokenizer tokenizer-path tokenizer-name",
    "weights are in fp32 unless --bf16 or --fp16 is given": "precision dtype mixed-precision",
    "kernels are chosen by what the device supports": "flash-attn flash-attention",
}


@per_features
def synonyms() -> Mapping[str, str | tuple[str, ...]]:
    """Return the meaning of names of other projects: our flags, or a sentence."""
    found: dict[str, str | tuple[str, ...]] = {}
    for flags, names in _FLAGS.items():
        found |= dict.fromkeys(names.split(), tuple(flags.split()))
    for sentence, names in _SENTENCES.items():
        found |= dict.fromkeys(names.split(), sentence)
    for feature in features():
        for name, meant in feature.synonyms.items():
            found[name] = (meant,) if meant.startswith("--") else meant
    return MappingProxyType(found)


def near_flag(typed: str, known: Iterable[str]) -> str:
    """Return the text to add to `unknown flag --typed`: `; did you mean '--lr'?`, `: a sentence.`, or nothing."""
    return _near(
        typed.lstrip("-"), {flag.lstrip("-"): flag for flag in known}, lambda flag: flag
    )


def near_key(name: str, known: Mapping[str, str]) -> str:
    """`near_flag` for the key of a file. known: name with underscores → the name as the file writes it."""
    return _near(
        name, known, lambda flag: known.get(flag.removeprefix("--").replace("-", "_"))
    )


def most_similar(name: str, known: Sequence[str]) -> str | None:
    """Return the known name with the highest ratio of difflib, ignoring case; None below the cutoff."""
    folded = {k.lower().replace("_", "-"): k for k in known}
    near = difflib.get_close_matches(
        name.lower().replace("_", "-"), folded, n=1, cutoff=CUTOFF
    )
    return folded[near[0]] if near else None


def _near(
    name: str, known: Mapping[str, str], written: Callable[[str], str | None]
) -> str:
    """Return the end of a message that suggests known names similar to `name`; "" if there are none.

    known    each valid name → how it is written here
    written  from a flag of this package to how it is written here; None if it is not valid here
    """
    meant = synonyms().get(name.lower().replace("_", "-"))
    if isinstance(meant, str):
        return f": {meant}."
    names = [word for flag in meant or () if (word := written(flag))]
    if not names and (similar := most_similar(name, list(known))):
        names = [known[similar]]
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""
