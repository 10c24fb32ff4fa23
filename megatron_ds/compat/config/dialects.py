"""Flags of Megatron's forks: one table a fork; `WORDS`, all of them for the readers of flags and files.

A `Dialect` has these parts. `names` are flags with an option here under another name; the value of a name is
the flag here, or a flag with its value for a switch. `readers` are flags that stand for options here in another
form: the first of these options, and the function (words, flag) → settings (`word_readers.py`). `answers` are
flags without an option: accepted where they change no number, refused with the reason where they do
(`unsupported.py`). Names of Megatron itself are in `unsupported*.py` and in the options, but for its readers; a flag that several forks have is in
the first table that has it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from ...config.sources.answers import OFF, Answer, table
from ...config.sources.foreign_words import ForeignWords, Reader
from ...features import Later

own = partial(Later, __package__)

SPLITS = "...data.loading.weighted_splits"
DEFAULT_KERNELS = "kernels are chosen by what the device supports"
DEFAULT_LAYERS = "there is one implementation of each layer"
FOREIGN_LAYERS = "the layers of a model are chosen by its options. Remove it."


# The bounds of Llama 3's scaling of rotary frequencies, as flags of forks.
LLAMA_3 = {"--low-freq-factor": ("1", "1.0"), "--high-freq-factor": ("4", "4.0")}

T = TypeVar("T")


@dataclass(frozen=True)
class Dialect:
    """The flags of one fork."""

    project: str
    names: Mapping[str, str] = field(default_factory=dict)
    readers: Mapping[str, tuple[str, Reader]] = field(default_factory=dict)
    answers: Mapping[str, Answer] = field(default_factory=dict)


def one_of(option: str, flags: Mapping[str, str]) -> tuple[str, Reader]:
    """Return the reader of a flag whose words stand for flags here, "" for none."""
    return option, partial(own(".word_readers:one_of"), flags)


def in_words(option: str, words: Later) -> tuple[str, Reader]:
    """Return the reader of a flag whose words are those of an option here in another form."""
    return option, partial(own(".word_readers:in_words"), option, words)


def _weighted_split_readers() -> dict[str, tuple[str, Reader]]:
    """Return the mapping flag of the corpora of one split → the option and how its words are read."""
    readers: dict[str, tuple[str, Reader]] = {}
    for part in ("train", "valid", "test"):
        flag = f"--{part}-weighted-split-paths"
        option = f"--{part}-data-path"
        words = Later(__package__, f"{SPLITS}:words_of_groups")
        file = Later(__package__, f"{SPLITS}:file_of_groups")
        readers[flag] = in_words(option, words)
        readers[f"{flag}-path"] = in_words(option, file)
    return readers


BIGSCIENCE = Dialect(
    "bigscience-workshop/Megatron-DeepSpeed",
    names={
        "--tokenizer-name-or-path": "--tokenizer-model",
        "--pad-vocab-size-to": "--padded-vocab-size",
        "--use-checkpoint-lr-scheduler": "--use-checkpoint-opt-param-scheduler",
    },
    readers={
        **_weighted_split_readers(),
        "--pp-partition-method": one_of(
            "--account-for-embedding-in-pipeline-split",
            {
                "type:transformer": "",
                "uniform": "",
                "parameters": "",
                "type:transformer|embedding": "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            },
        ),
        "--eval-only": one_of(
            "--skip-train", dict.fromkeys(("True", "true", "1"), "--skip-train")
        ),
        "--glu-activation": ("--activation", own(".block_words:gated")),
    },
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
            "spans of tokens are not masked. Remove it.": "--noise-density --mean-noise-span-length",
            "megatron-ds generate continues texts, megatron-ds train --skip-train evaluates. Remove it.": "--inference",
            "write --finetune, which loads weights only and starts at the first step.": "--reset-progress",
            "it is of corpora of questions and answers, two files each, which are not read. megatron-ds preprocess "
            "--chat makes such a corpus, and --sft trains on its answers, of which every token weighs alike. Remove it.": "--norm-target-loss --norm-target-loss-by-length --loss-on-targets-only",
            "every token sees only the tokens before it. Remove it.": "--prefix-lm --prefixlm --reweight-loss-based-on-position-frequency",
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
    readers={
        "--use-z-loss": one_of("--z-loss-strength", {"": "--z-loss-strength 1e-4"}),
    },
    answers=table(
        accepted={
            "the launcher is recognised from the environment": "--use-mpi",
        },
        refused={
            "a fixed identifier would continue a run of W&B. Remove it.": "--wandb-id",
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
        "--num-layer-list": "--pipeline-layout",
        "--moe-intermediate-size": "--moe-ffn-hidden-size",
        "--n-group": "--moe-router-num-groups",
        "--topk-group": "--moe-router-group-topk",
        "--routed-scaling-factor": "--moe-router-topk-scaling-factor",
        "--embedding-multiplier-scale": "--embedding-multiplier",
        "--beta-fast": "--yarn-beta-fast",
        "--beta-slow": "--yarn-beta-slow",
        "--rope-scaling-beta-fast": "--yarn-beta-fast",
        "--rope-scaling-beta-slow": "--yarn-beta-slow",
        "--rope-scaling-mscale": "--yarn-mscale",
        "--rope-scaling-mscale-all-dim": "--yarn-mscale-all-dim",
        "--rope-scaling-original-max-position-embeddings": "--original-max-position-embeddings",
    },
    readers={
        "--first-k-dense-replace": (
            "--moe-layer-freq",
            own(".block_words:first_dense"),
        ),
        "--n-shared-experts": (
            "--moe-shared-expert-intermediate-size",
            own(".block_words:shared_experts"),
        ),
        "--norm-topk-prob": (
            "--moe-router-pre-softmax",
            own(".block_words:normalized_weights"),
        ),
        "--rope-scaling-type": (
            "--position-embedding-type",
            own(".rotary_words:scaled"),
        ),
    },
    answers=table(
        accepted={
            "on GPUs tensors are sent by NCCL, and gloo connects the ranks for control messages alone": "--disable-gloo-group --hccl-slice-size",
            DEFAULT_KERNELS: "--shape-order --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb --use-fused-softmax "
            "--use-fused-ring-attention-update --use-fusion-attn-v2 "
            "--use-fused-moe-token-permute-and-unpermute "
            "--gemm-gradient-accumulation-fusion --jit-compile --ai-framework --use-fused-mlp",
            "transfers are overlapped with computation automatically": "--use-cp-send-recv-overlap --moe-permutation-async-comm --moe-alltoall-overlap-comm "
            "--use-ascend-coc --coc-fused-kernel --coc-parallel-num --use-ascend-mc2 --use-mc2 "
            "--cp-attention-mask-type --attention-mask-on-cpu",
            "every node opens the data that it can see; index maps are built once a file system": "--no-shared-storage",
            "--load recognises a folder of Hugging Face": "--enable-hf2mg-convert --model-type-hf",
            "rows of a batch have one length": "--tokenizer-padding-side --variable-seq-lengths",
            "masks of attention follow from the model and the options of documents": "--attention-mask-type",
            "the order of additions follows from the layout; a run on one layout repeats bit by bit": "--npu-deterministic",
            "the tokenizers library and the Python code give the same ids": "--tokenizer-not-use-fast",
            "memory only: what is kept or recomputed changes no number": "--reuse-fp32-param --swap-optimizer --swap-optimizer-times --swap-attention --swap-modules "
            "--recompute-activation-function --recompute-activation-function-num-layers --recompute-norm "
            "--moe-zero-memory --enable-token-rearrange-opt "
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
            "it adds a loss of each sequence, divided by --tensor-model-parallel-size. Write "
            "--moe-router-load-balancing-type seq_aux_loss.": "--seq-aux",
            "every expert would receive the same number of tokens, which tests of speed ask for; the loss is none. "
            "Remove it.": "--fix-router",
            "megatron-ds preprocess --chat makes a corpus of conversations, and --sft trains on their answers "
            "(docs/use/finetune.md). Remove it.": "--stage --is-instruction-dataset --prompt-type --prompt-type-path --neat-pack --padded-samples "
            "--no-pad-to-seq-lengths --cut-max-seqlen --history-turns --full-shuffle-instruction-dataset",
            "megatron-ds preprocess --preference makes a corpus of pairs of answers, and --dpo trains on them "
            "(docs/use/finetune.md). Remove it.": "--is-pairwise-dataset --dpo-loss-type",
            "experts of a group of devices have no balancing loss of their own. Remove it.": "--moe-device-level-aux-loss-coeff --moe-comm-aux-loss-coeff",
            "frequencies of long texts are scaled by --rope-scaling-type yarn or llama3. Remove it.": "--longrope-freqs-type --long-factor --short-factor --long-mscale --short-mscale",
            "write --moe-shared-expert-gate.": "--shared-expert-gate",
        },
        only={
            **{
                flag: Answer(
                    "it is that of Llama 3",
                    "--use-rope-scaling has the numbers of Llama 3. Remove it.",
                    (*values, *OFF),
                )
                for flag, values in LLAMA_3.items()
            },
            "--optimizer-selection": Answer(
                "AdamW has one implementation",
                "write --optimizer.",
                ("fused_adamw", "fused_torch_adamw", *OFF),
            ),
            "--output-layer-slice-num": Answer(
                "the output layer is one product",
                "the output layer is one product. Remove it.",
                ("1", *OFF),
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
    names={
        "--patch-tokenizer-type": "--tokenizer-type",
        "--intermediate-size": "--ffn-hidden-size",
        "--n-head-kv": "--num-query-groups",
    },
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
            "this activation is not available. Remove it.": "--xielu",
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

BIGCODE = Dialect(
    "bigcode-project/Megatron-LM",
    names={
        "--tokenizer-file": "--tokenizer-model",
        "--wandb-entity-name": "--wandb-entity",
        "--wandb-project-name": "--wandb-project",
    },
    readers={
        "--attention-head-type": one_of(
            "--num-query-groups",
            {"multihead": "", "multiquery": "--num-query-groups 1"},
        ),
    },
    answers=table(
        accepted={
            "the log has the time of each line, and of the rank that writes it": "--structured-logs --structured-logs-dir",
            "it changes what is timed, no number of the run": "--transformer-timers",
        },
        refused={},
        only={},
    ),
)

ATTENTION_BENCHMARK = Dialect(
    "elena-lyulina/Megatron-LM-Attention-Benchmark",
    names={"--use-packed-seq-params": "--reset-attention-mask"},
)

PIER = Dialect(
    "zetsunozomi/Pier-LLM-Pretraining",
    answers=table(
        accepted={},
        refused={
            "all data-parallel ranks make the same step; there is no outer optimizer over groups that differ. Remove it.": "--outer-optimizer --outer-sync-interval --num-subgroup --momentum-warmup-steps",
        },
        only={},
    ),
)

SIMULATORS = Dialect(
    "fwyc0573/Megatron-LM",
    answers=table(
        accepted={},
        refused={
            "ranks are not simulated: megatron-ds train --dry-run plans a run of any size on one process. Remove it.": "--do-trace --trace-start --nsight-start --fake-dp --fake-gpus-per-node --fake-local-rank --fake-pp "
            "--fake-tp --fake-world-size --fake-wrank --fake-current-rank-id",
            "write --tokenizer-type.": "--main-tokenizer-type",
        },
        only={},
    ),
)

PATTERN = ("--num-layers", own(".hybrid_pattern:settings_of_pattern"))
# Names of the pattern of a hybrid model; the second is the older one.
PATTERN_FLAGS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
MEGATRON = Dialect("NVIDIA/Megatron-LM", readers=dict.fromkeys(PATTERN_FLAGS, PATTERN))

DIALECTS = (
    MEGATRON,
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
    BIGCODE,
    ATTENTION_BENCHMARK,
    PIER,
    SIMULATORS,
)


def _joined(tables: Iterable[Mapping[str, T]]) -> MappingProxyType[str, T]:
    """Join the tables of the dialects, of which the first comes last: it counts where two have one flag."""
    joined: dict[str, T] = {}
    for flags in tables:
        joined |= flags
    return MappingProxyType(joined)


FORK_NAMES = _joined(dialect.names for dialect in reversed(DIALECTS))
FORK_READERS = _joined(dialect.readers for dialect in reversed(DIALECTS))
FORK_FLAGS = _joined(dialect.answers for dialect in reversed(DIALECTS))


def _projects() -> dict[str, str]:
    """Return the mapping flag of a fork → its project. If two dialects have a flag, the first counts."""
    projects: dict[str, str] = {}
    for dialect in reversed(DIALECTS):
        projects |= dict.fromkeys(dialect.names, dialect.project)
    return projects


WORDS = ForeignWords(
    names=FORK_NAMES,
    projects=_projects(),
    readers=FORK_READERS,
    answer_to_flag=own(".unsupported:answer_to_flag"),
    read_yamls=own(".neox_yaml:read_yamls"),
    read_deepspeed=own(".deepspeed_json:read_deepspeed"),
)
