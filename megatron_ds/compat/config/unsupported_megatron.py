"""Flags of Megatron-LM and Megatron-DeepSpeed that choose an implementation or are not available.

`unsupported.py` states when a flag is accepted and when it is refused; layers with experts are in
`unsupported_moe.py`.
"""

from ...config.sources.answers import OFF, Answer, table

# Values of --spec that name the layers which options choose anyway: Megatron's own, and Huawei's for Qwen 3,
# which is the same with --qk-layernorm.
HYBRID_LAYERS = "megatron.core.models.hybrid.hybrid_layer_specs"
DEFAULT_SPECS = (
    # Those of pretrain_hybrid.py, whose layers are in --hybrid-layer-pattern.
    f"{HYBRID_LAYERS} hybrid_stack_spec",
    f"{HYBRID_LAYERS} mamba_stack_spec",
    "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
    "local",
    "megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_local_spec",
    "megatron.core.models.gpt.gpt_layer_specs get_gpt_layer_with_transformer_engine_spec",
    "mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec",
)

TP_TRANSFERS = (
    "no effect yet: of the transfers of tensor parallelism, only those of gradients overlap, with the weight "
    "gradient"
)
NO_GRAPHS = "no effect yet: kernels are launched one by one; there are no CUDA graphs"

MEGATRON_FLAGS = table(
    accepted={
        "--async-save copies a rank's state and writes it in a thread of that rank": "--async-ckpt-use-cached-structure --async-ckpt-use-cpu-shm --async-strategy "
        "--use-persistent-ckpt-worker",
        "every rank writes and reads its own part of a checkpoint, which loads at any layout": "--auto-detect-ckpt-format --ckpt-assume-constant-structure --ckpt-fully-parallel-load "
        "--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-save --dist-ckpt-workers "
        "--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient "
        "--no-ckpt-fully-parallel-save --universal-checkpoint",
        "a missing or an unexpected tensor of a checkpoint is always an error": "--dist-ckpt-strictness",
        "files of a checkpoint have checksums, which loading compares": "--verify-integrity",
        "transfers of pipelines and of ZeRO are overlapped with computation automatically": "--no-align-param-gather "
        "--overlap-p2p-communication-warmup-flush --overlap-param-gather-with-optimizer-step",
        TP_TRANSFERS: "--tp-comm-bootstrap-backend --tp-comm-overlap --tp-comm-overlap-cfg",
        "no effect yet: weight gradients are computed in the backward of their layer, or later by a schedule of "
        "the ZB family": "--defer-embedding-wgrad-compute --delay-wgrad-compute --wgrad-deferral-limit",
        NO_GRAPHS: "--cuda-graph-impl --cuda-graph-modules --cuda-graph-scope --cuda-graph-warmup-steps "
        "--enable-cuda-graph --external-cuda-graph",
        "dropout has no state: its masks follow from the seed and the position of a sample": "--te-rng-tracker "
        "--use-te-rng-tracker",
        "no effect yet: Transformer Engine is not used": "--use-transformer-engine-op-fuser",
        "memory of the device is managed by torch's allocator": "--empty-unused-memory-level",
        "no effect yet: buffers are torch's, and not registered with NCCL": "--fsdp-double-buffer "
        "--fsdp-manual-registration --use-nccl-ub",
        "on GPUs tensors are sent by NCCL, and gloo connects the ranks for control messages alone": "--disable-gloo-process-groups "
        "--enable-gloo-process-groups",
        "no effect yet: messages of a pipeline are sends and receives of NCCL, or of gloo on CPUs": "--use-ring-exchange-p2p",
        "recomputation has one implementation; --checkpoint-activations or --recompute-granularity turns it "
        "on": "--deepspeed-activation-checkpointing",
        "--data-parallel-sharding-strategy sets what is split; without it nothing is": "--use-megatron-fsdp",
        "weights are drawn where they are kept": "--init-model-with-meta-device",
        "gradients are averaged over the ranks": "--ddp-average-in-collective",
        "it changes which ranks keep a copy of the state, not the numbers; --zero-stage splits it over all "
        "data-parallel ranks": "--no-use-layer-wise-param-layout --num-distributed-optimizer-instances",
        "no effect yet: selective recomputation is that of core attention alone. What is recomputed changes "
        "memory and time, no number": "--recompute-modules",
        "the launcher is recognised from the environment": "--master-addr --master-port",
        "rank 0 logs progress, other ranks warnings": "--logging-level",
        "no feature needs it": "--enable-experimental",
        "the log and metrics.jsonl have the progress of a run": "--log-progress",
        "index maps are built in parallel": "--num-dataset-builder-threads",
        "dtypes of master weights, gradients and moments have flags of their own": "--use-precision-aware-optimizer",
        "it applies to TikTokenizer only": "--tiktoken-num-special-tokens --tiktoken-pattern "
        "--tiktoken-special-tokens",
        "weights that tensor-parallel ranks share have one gradient, and stay equal": "--test-mode",
        "--ds-sequence-parallel-size sets how many ranks exchange tokens for heads; a single one has nothing "
        "to exchange": "--force-ds-sequence-parallel",
    },
    refused={
        "the places of layers have one spelling: write --hybrid-layer-pattern with M (Mamba), * (attention), - (feed-forward) "
        "and E (experts).": "--hybrid-attention-ratio --hybrid-mlp-ratio",
        "attention is not divided into chunks of a sequence. Remove it.": "--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size "
        "--ds-sequence-parallel-fpdt-offloading",
        "attention sees all keys that its options name. Remove it.": "--dsa-indexer-head-dim --dsa-indexer-loss-coeff --dsa-indexer-n-heads "
        "--dsa-indexer-topk",
        "the chat template of the tokenizer makes conversations texts, in megatron-ds preprocess --chat "
        "(--chat-template names another). Remove it.": "--sft-tokenizer-prompt-format",
        "distillation takes the teacher and its sizes from a checkpoint: write --distill-from PATH, with "
        "--distill-weight and --distill-temperature (docs/use/finetune.md).": "--export-kd-cfg --export-kd-teacher-load --hidden-size-teacher --kd --kd-alpha-ce --kd-beta-ce --kd-temp "
        "--load-teacher --num-attention-heads-teacher --num-experts-teacher --num-layers-teacher",
        "a mixture of students is not available. Remove it.": "--mos",
        "write learning rates that follow the width as --param-group (docs/scale/optimizers.md).": "--mup-base-hidden-size --use-mup",
        "this activation is not available. Remove it.": "--activation-func-clamp-value --enable-gpt-oss --glu-linear-offset --quick-geglu",
        "the layers of a model are chosen by its options. Remove it.": "--export-force-local-attention",
        "errors are not injected. Remove it.": "--error-injection-type",
        "torch's default decides how matrix products of bf16 are summed. Remove it.": "--disable-bf16-reduced-precision-matmul",
        "activations that are not recomputed stay on the device. Write --recompute-granularity full if they "
        "do not fit, with --checkpoint-in-cpu if inputs of layers do not fit either.": "--cpu-offloading --cpu-offloading-activations --cpu-offloading-double-buffering "
        "--cpu-offloading-num-layers --cpu-offloading-retain-pinned-cpu-buffers "
        "--fine-grained-activation-offloading --offload-modules",
        "write --zero-stage 3 --offload-param cpu, which keeps weights in host memory.": "--cpu-offloading-weights",
        "all sequences have one length and are split over --context-parallel-size ranks. Set that, and "
        "remove this.": "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank",
        "write --finetune, which loads weights only and starts at the first step.": "--no-load-lr-state --reset-iteration",
        "fp8 is not available. Use --bf16, and remove it.": "--first-last-layers-bf16 --num-layers-at-end-in-bf16 --num-layers-at-start-in-bf16",
    },
    only={
        "--muon-tp-mode": Answer(
            "the update is that of whole matrices, which tensor-parallel ranks share out",
            "the update is that of whole matrices; that of each part by itself would depend on the layout. "
            "Remove it.",
            ("duplicated", "distributed", None, "auto"),
        ),
        "--rerun-mode": Answer(
            "a loss that is not finite is located, and ends the run unless --check-for-nan continue is given",
            "steps are not computed twice to find faults of the hardware. Remove it.",
            ("disabled", "validate_results", *OFF),
        ),
        "--spec": Answer(
            "there is one implementation of each layer",
            "the layers of a model are chosen by its options. Remove it.",
            (*DEFAULT_SPECS, *OFF),
        ),
        **{
            flag: Answer(
                "it is in fp32",
                "master weights and moments are in fp32. Remove it.",
                ("fp32", *OFF),
            )
            for flag in ("--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")
        },
        "--error-injection-rate": Answer(
            "errors are not injected",
            "errors are not injected. Remove it.",
            ("0", *OFF),
        ),
        "--megatron-fsdp-main-params-dtype": Answer(
            "master weights are in fp32",
            "master weights are in fp32. Remove it.",
            ("fp32", *OFF),
        ),
        "--megatron-fsdp-main-grads-dtype": Answer(
            "gradients accumulate in fp32",
            "write --main-grads-dtype.",
            ("fp32", "auto", *OFF),
        ),
        "--megatron-fsdp-grad-comm-dtype": Answer(
            "gradients are sent in fp32, in which they accumulate",
            "write --communication-data-type.",
            ("fp32", "auto", *OFF),
        ),
        "--outer-dp-sharding-strategy": Answer(
            "ZeRO splits state over all data-parallel ranks",
            "ZeRO splits state over all data-parallel ranks. Remove it.",
            ("no_shard", *OFF),
        ),
    },
)
