"""Flags of Megatron's forks: one table a fork.

A `Dialect` has these parts. `names` are flags with an option here under another name; the value of a name is
the flag here, or a flag with its value for a switch. `phrases` are flags with values that stand for several
flags here; another value is refused. `readers` are flags with the words of an option here in another form:
the option, and the function (words, flag) → words of the option. `answers` are flags without an option:
accepted where they change no number, refused with the reason where they do (`unsupported.py`). Names of
Megatron itself are in `unsupported*.py` and in the options; a flag that several forks have is in the first
table that has it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from ...config.sources.answers import OFF, Answer, table
from ...features import Later

Reader = Callable[[Sequence[str], str], list[str]]

SPLITS = "...data.loading.weighted_splits"
DEFAULT_KERNELS = "kernels are chosen by what the device supports"
DEFAULT_LAYERS = "there is one implementation of each layer"
FOREIGN_LAYERS = "the layers of a model are chosen by its options. Remove it."


T = TypeVar("T")


@dataclass(frozen=True)
class Dialect:
    """The flags of one fork."""

    project: str
    names: Mapping[str, str] = field(default_factory=dict)
    phrases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    readers: Mapping[str, tuple[str, Reader]] = field(default_factory=dict)
    answers: Mapping[str, Answer] = field(default_factory=dict)


def _weighted_split_readers() -> dict[str, tuple[str, Reader]]:
    """Return the mapping flag of the corpora of one split → the option and how its words are read."""
    readers: dict[str, tuple[str, Reader]] = {}
    for part in ("train", "valid", "test"):
        flag = f"--{part}-weighted-split-paths"
        option = f"--{part}-data-path"
        readers[flag] = (option, Later(__package__, f"{SPLITS}:words_of_groups"))
        readers[f"{flag}-path"] = (
            option,
            Later(__package__, f"{SPLITS}:file_of_groups"),
        )
    return readers


BIGSCIENCE = Dialect(
    "bigscience-workshop/Megatron-DeepSpeed",
    names={
        "--tokenizer-name-or-path": "--tokenizer-model",
        "--pad-vocab-size-to": "--padded-vocab-size",
        "--use-checkpoint-lr-scheduler": "--use-checkpoint-opt-param-scheduler",
    },
    phrases={
        "--pp-partition-method": {
            "type:transformer": "",
            "uniform": "",
            "parameters": "",
            "type:transformer|embedding": "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        },
        "--eval-only": {
            "True": "--skip-train",
            "true": "--skip-train",
            "1": "--skip-train",
        },
    },
    readers=_weighted_split_readers(),
    answers=table(
        accepted={
            DEFAULT_KERNELS: "--abort-on-unmet-fused-kernel-constraints",
            "weights that tensor-parallel ranks share have one gradient, and stay equal": "--sync-tp-duplicated-parameters",
            "the launcher is recognised from the environment": "--launcher",
            "it applies to a log of CodeCarbon only": "--codecarbon-dir",
            "the learning rate always follows from the flags and from progress": "--override-lr-scheduler",
            "the arguments are in the log, and in run.json of each checkpoint": "--log-path",
            "--num-workers counts the threads of each part of the data": "--valid-num-workers",
        },
        refused={
            "for swiglu write --swiglu, and --ffn-hidden-size, which is 4 times --hidden-size there unless it is "
            "given. For geglu write --activation geglu, whose gelu is the tanh approximation. liglu and reglu are not "
            "available.": "--glu-activation",
            "spans of tokens are not masked. Remove it.": "--noise-density --mean-noise-span-length",
            "megatron-ds generate continues texts, megatron-ds train --skip-train evaluates. Remove it.": "--inference",
            "write --finetune, which loads weights only and starts at the first step.": "--reset-progress",
            "the loss is that of all tokens alike. Remove it.": "--norm-target-loss",
            "every token sees only the tokens before it. Remove it.": "--prefix-lm --prefixlm --loss-on-targets-only --reweight-loss-based-on-position-frequency",
            "write learning rates that follow the width as --param-group (docs/scale/optimizers.md).": "--mup --mup-attn-mult --mup-input-mult --mup-output-mult",
        },
        only={},
    ),
)

MEGATRON_LLAMA = Dialect(
    "alibaba/Megatron-LLaMA",
    names={
        "--RMSNorm": "--normalization RMSNorm",
        "--overlapped-distributed-optimizer": "--use-distributed-optimizer",
        "--job-name": "--wandb-exp-name",
    },
    answers=table(
        accepted={
            "a GPT is always causal": "--causal-lm",
            "gradients lie in buckets of one size, which changes no number": "--max-local-bucket-size",
        },
        refused={},
        only={},
    ),
)

LLM_JP = Dialect(
    "llm-jp/Megatron-LM and rioyokotalab/Megatron-Llama2",
    names={"--wandb-name": "--wandb-exp-name"},
    answers=table(
        accepted={
            "the launcher is recognised from the environment": "--use-mpi",
        },
        refused={
            "a fixed identifier would continue a run of W&B. Remove it.": "--wandb-id",
            "the loss has no term of the normalizer of the softmax. Remove it.": "--use-z-loss --z-loss-strength",
        },
        only={},
    ),
)

MINDSPEED = Dialect(
    "Ascend/MindSpeed-LLM",
    names={
        "--context-parallel-algo": "--cp-comm-type",
        "--use-glm-rope": "--rotary-interleaved",
        "--attn-logit-softcapping": "--attention-logit-softcapping",
        "--output-logit-softcapping": "--final-logit-softcapping",
        "--post-norm": "--norm-after-sublayer",
    },
    answers=table(
        accepted={
            DEFAULT_KERNELS: "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-softmax "
            "--use-fused-ring-attention-update --use-fusion-attn-v2 "
            "--use-fused-moe-token-permute-and-unpermute "
            "--gemm-gradient-accumulation-fusion --jit-compile --ai-framework --use-fused-mlp",
            "transfers are overlapped with computation automatically": "--use-cp-send-recv-overlap --moe-permutation-async-comm --moe-alltoall-overlap-comm "
            "--use-ascend-coc --coc-fused-kernel --coc-parallel-num --use-ascend-mc2 --use-mc2 "
            "--cp-attention-mask-type --attention-mask-on-cpu",
            "every node opens the data that it can see; index maps are built once a file system": "--no-shared-storage",
            "--load recognises a folder of Hugging Face": "--enable-hf2mg-convert --model-type-hf",
            "rows of a batch have one length": "--tokenizer-padding-side",
            "the tokenizers library and the Python code give the same ids": "--tokenizer-not-use-fast",
            "memory only: what is kept or recomputed changes no number": "--reuse-fp32-param --swap-optimizer --swap-optimizer-times --swap-attention --swap-modules "
            "--recompute-activation-function --recompute-norm --moe-zero-memory "
            "--adaptive-memory-optimization --recompute-in-bubble --recompute-in-advance "
            "--moe-zero-memory-num-layers --enable-recompute-layers-per-pp-rank",
            "the router computes in fp32": "--router-gating-in-fp32 --topk-softmax-in-fp32 "
            "--moe-revert-type-after-topk",
            "no layer is skipped by default; a plain restart resumes a job": "--enable-high-availability",
        },
        refused={
            "the raw file of a handler is not read. Convert it with megatron-ds preprocess, and remove it.": "--handler-name",
            "write --embedding-multiplier with the root of --hidden-size.": "--input-embeds-norm",
            "norms multiply by their weight; --apply-layernorm-1p by 1 + weight. Write that.": "--add-rmsnorm-offset",
            "layers are not skipped. Write --pipeline-layout for an uneven pipeline.": "--noop-layers",
            "write --softmax-scale with one over the root of the number.": "--query-pre-attn-scalar",
            "write --moe-shared-expert-intermediate-size, which is this times --moe-ffn-hidden-size.": "--n-shared-experts",
            "the weights of the chosen experts sum to 1 by default, also those of sigmoids. Remove it and "
            "--moe-router-pre-softmax, and with --moe-router-load-balancing-type aux_loss also "
            "--moe-router-topk-scaling-factor, which it undoes.": "--norm-topk-prob",
            "it adds a loss of each sequence, divided by --tensor-model-parallel-size. Write "
            "--moe-router-load-balancing-type seq_aux_loss.": "--seq-aux",
            "tokens choose their experts. Remove it.": "--fix-router",
            "write --moe-shared-expert-gate.": "--shared-expert-gate",
        },
        only={
            "--first-k-dense-replace": Answer(
                "no layer is dense because of it",
                "write the layers with experts as --moe-layer-freq: for K = 3 of 27 layers ([0]*3+[1]*24).",
                ("0", "-1", *OFF),
            ),
            "--shared-expert-gate-output-dimension": Answer(
                "the gate of the shared experts is one number",
                "the gate of the shared experts is one number a token. Remove it.",
                ("1", *OFF),
            ),
        },
    ),
)

PAI = Dialect(
    "alibaba/Pai-Megatron-Patch",
    names={"--patch-tokenizer-type": "--tokenizer-type"},
    answers=table(
        accepted={
            "samples have --seq-length tokens; longer padding is that of fine-tuning": "--max-padding-length",
            DEFAULT_KERNELS: "--use-llama2-rotary-position-embeddings",
        },
        refused={},
        only={
            "--rotary-scale-factor": Answer(
                "positions are not scaled",
                "positions are scaled by --rotary-seq-len-interpolation-factor or --use-rope-scaling. Remove "
                "it.",
                ("1", "1.0", *OFF),
            ),
            "--train-mode": Answer(
                "a run trains on whole documents",
                "a run trains on whole documents, not on answers. Remove it.",
                ("pretrain", *OFF),
            ),
            "--dataset": Answer(
                "datasets are memory-mapped .bin/.idx files",
                "did you mean '--data-path'? Only memory-mapped .bin/.idx datasets can be read. Convert the "
                "corpus with megatron-ds preprocess, and remove it.",
                ("MMAP", "LLama-Pretrain-Idxmap", "Mistral-Pretrain-Idxmap", *OFF),
            ),
        },
    ),
)

SWISS_AI = Dialect(
    "swiss-ai/Megatron-LM",
    answers=table(
        accepted={},
        refused={
            "every token counts in the loss. Remove it.": "--goldfish-loss --goldfish-h --goldfish-k",
            "this activation is not available. Remove it.": "--xielu",
            "this optimizer is not available. Remove it.": "--ademamix-alpha --ademamix-alpha-warmup --ademamix-beta3 --ademamix-beta3-warmup",
        },
        only={
            "--qknorm-impl": Answer(
                "--qk-layernorm normalizes heads as --normalization does",
                "remove it.",
                ("te", *OFF),
            ),
        },
    ),
)

HYGON = Dialect(
    "HYGON-AI/Megatron-LM-das",
    answers=table(
        accepted={
            "the launcher is recognised from the environment": "--dist-url",
            "the offloaded update is that of the optimizer on the device": "--use-torch-optimizer-for-cpu-offload",
        },
        refused={
            "gradients and tokens are sent unquantized. Remove it.": "--use-quantize-comm",
            "experts are exchanged over all ranks. Remove it.": "--use-intra-ep",
        },
        only={},
    ),
)

HABANA = Dialect(
    "HabanaAI/Megatron-DeepSpeed",
    answers=table(
        accepted={
            DEFAULT_KERNELS: "--use-fused-sdpa --use-fused-sdpa-with-recompute --use-torch-compile "
            "--use-fast-softmax --use-hpu-graphs",
            "experts are sent whole or in parts, which changes no number": "--use-data-before-expert-parallelism",
        },
        refused={},
        only={},
    ),
)

ZYPHRA = Dialect(
    "Zyphra/Megatron-LM",
    names={"--hf-autotokenizer-model": "--tokenizer-model"},
    answers=table(
        accepted={
            "the log and metrics.jsonl have how many tokens each expert receives": "--router-profiling-path --router-profiling-interval",
        },
        refused={},
        only={},
    ),
)

ARGONNE = Dialect(
    "argonne-lcf/Megatron-DeepSpeed",
    answers=table(
        accepted={},
        refused={
            "a list with a third column, the source of a corpus, is not read. Write weights and prefixes into a "
            "file, and name it with --data-args-path.": "--data-file-list",
        },
        only={},
    ),
)

MEGABLOCKS = Dialect(
    "databricks/megablocks",
    answers=table(
        accepted={
            "--expert-model-parallel-size sets how many ranks share the experts, which changes no number": "--moe-expert-model-parallelism",
            "the balancing loss is always computed in fp32": "--moe-lbl-in-fp32",
        },
        refused={
            "write --num-experts N --moe-router-topk 1 --moe-router-pre-softmax, in place of the other flags of "
            "experts.": "--moe-use-megatron-switch",
            "gates with the activation gelu are not available. For swiglu write --swiglu and --ffn-hidden-size.": "--glu",
            "a layer of MegaBlocks has one bias after the sum over its experts, which have none of their own; "
            "the experts here have one each, or none. For the nearest model write --num-experts N and "
            "--moe-router-pre-softmax.": "--moe-num-experts",
            "write --moe-router-topk (its default in MegaBlocks is 1) with --num-experts.": "--moe-top-k",
            "write --moe-aux-loss-coeff, which is this divided by --num-layers (its default is 0.1).": "--moe-loss-weight",
            "write --moe-input-jitter-eps.": "--moe-jitter-eps",
        },
        only={
            "--moe-capacity-factor": Answer(
                "0 drops no token, which is the default",
                "an expert takes the first floor(factor × k × tokens / experts) tokens of a micro-batch. Write "
                "--moe-expert-capacity-factor, --moe-token-drop-policy position and --moe-capacity-scope "
                "micro-batch, which round up.",
                ("0", *OFF),
            ),
        },
    ),
)

DIALECTS = (
    BIGSCIENCE,
    MEGATRON_LLAMA,
    LLM_JP,
    MINDSPEED,
    PAI,
    SWISS_AI,
    HYGON,
    HABANA,
    ZYPHRA,
    ARGONNE,
    MEGABLOCKS,
)


def _joined(tables: Iterable[Mapping[str, T]]) -> MappingProxyType[str, T]:
    """Join the tables of the dialects, of which the first comes last: it counts where two have one flag."""
    joined: dict[str, T] = {}
    for flags in tables:
        joined |= flags
    return MappingProxyType(joined)


FORK_NAMES = _joined(dialect.names for dialect in reversed(DIALECTS))
FORK_PHRASES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {name: values for dialect in DIALECTS for name, values in dialect.phrases.items()}
)
FORK_READERS: Mapping[str, tuple[str, Reader]] = MappingProxyType(
    {name: reader for dialect in DIALECTS for name, reader in dialect.readers.items()}
)
FORK_FLAGS = _joined(dialect.answers for dialect in reversed(DIALECTS))
