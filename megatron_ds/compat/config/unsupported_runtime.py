"""Flags of Megatron about buffers, overlap, logging, fault tolerance and the opening of data.

Most choose how a run is executed, not what it computes. `unsupported.py` states when a flag is accepted and
when it is refused.
"""

from ...config.sources.answers import OFF, Answer, table
from .unsupported_megatron import NO_GRAPHS, TP_TRANSFERS

DEFAULT_KERNELS = "kernels are chosen by what the device supports"

RUNTIME_FLAGS = table(
    accepted={
        DEFAULT_KERNELS: "--cpu-torch-adam --disable-mem-efficient-ln --ds-fused-adam --flash-decode --no-fp8-wgrad "
        "--no-gradient-reduce-div-fusion --onnx-safe --use-flash-attn-builder "
        "--use-flash-attn-v1",
        NO_GRAPHS: "--optimizer-cuda-graph",
        TP_TRANSFERS: "--disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad --disable-tp-comm-overlap-ag "
        "--disable-tp-comm-overlap-rs --disable-tp-comm-split-ag --disable-tp-comm-split-rs "
        "--tp-comm-overlap-rs-dgrad",
        "transfers of pipelines and of ZeRO are overlapped with computation automatically": "--no-align-grad-reduce "
        "--no-delay-grad-reduce --no-overlap-p2p-communication --overlap-cpu-optimizer-d2h-h2d "
        "--overlap-p2p-communication",
        "gradients lie in flat buckets, each reduced once by the collective of its ZeRO stage": "--ddp-num-buckets --ddp-pad-buckets-for-high-nccl-busbw --no-contiguous-buffers-in-local-ddp "
        "--suggested-communication-unit-size --use-contiguous-buffers-in-ddp "
        "--zero-allgather-bucket-size --zero-contigious-gradients --zero-reduce-bucket-size "
        "--zero-reduce-scatter",
        "activations are sent in the parts that ranks hold": "--no-scatter-gather-tensors-in-pipeline",
        "on GPUs the gathers of ZeRO 3 always have a communicator of their own": "--create-all-gather-group",
        "groups of ranks are made while a run is built": "--lazy-mpu-init",
        "--nccl-max-ctas limits NCCL's blocks by group": "--nccl-communicator-config-path",
        "pipelines send by NCCL on GPUs, by gloo on CPUs": "--pipeline-model-parallel-comm-backend",
        "memory only: what is kept or recomputed changes no number": "--checkpoint-num-layers --contigious-checkpointing --memory-centric-tiled-linear "
        "--no-clone-scatter-output-in-embedding "
        "--no-pin-cpu-grads --no-pin-cpu-params --profile-backward --scattered-embeddings "
        "--split-transformers --standalone-embedding-stage --synchronize-each-layer --tile-factor "
        "--torch-fsdp2-no-reshard-after-forward --use-pin-memory",
        "weights are drawn or loaded once": "--no-initialization",
        "it only tunes Python's garbage collection": "--no-manual-gc-eval",
        "it concerns services of one company's clusters": "--adlr-autoresume --adlr-autoresume-interval --app-tag-run-name --app-tag-run-version "
        "--enable-one-logger --no-one-logger --one-logger-async --one-logger-project "
        "--one-logger-run-name --run-workload-inspector-server",
        "a rank that fails ends the job, which its launcher can start again": "--calc-ft-timeouts --enable-ft-package --ft-num-warmup-iters --inprocess-active-world-size "
        "--inprocess-barrier-timeout --inprocess-completion-timeout --inprocess-empty-cuda-cache "
        "--inprocess-granularity --inprocess-hard-timeout --inprocess-heartbeat-interval "
        "--inprocess-heartbeat-timeout --inprocess-last-call-wait --inprocess-max-iterations "
        "--inprocess-monitor-process-interval --inprocess-monitor-thread-interval "
        "--inprocess-progress-watchdog-interval --inprocess-restart --inprocess-soft-timeout "
        "--inprocess-termination-grace-time",
        "it changes what is logged about the machines, no number of the run": "--config-logger-dir --disable-straggler-on-startup --log-level --log-level-replica "
        "--log-straggler --no-barrier-with-level-1-timing "
        "--straggler-ctrlr-port --straggler-minmax-count --train-sync-interval",
        "--otel-enabled has spans of the run, of its log intervals and of evaluations": "--otel-span-groups",
        "index maps and data files are memory-mapped": "--dataloader-defer-npy-index-mmap --dataloader-fast-cache-load --mmap-warmup "
        "--per-dataset-sequences-path",
        "no code of a tokenizer's folder is executed; its files are read": "--trust-remote-code",
        "a checkpoint loads at any layout; the flags set that of the run": "--no-use-tokenizer-model-from-checkpoint-args --use-mp-args-from-checkpoint-args",
        "it applies to generation only": "--max-tokens-to-oom",
    },
    refused={
        "the loss is computed in fp32. Remove it.": "--fp16-lm-cross-entropy",
        "initial weights are normally distributed; see --init-method-std. Remove it.": "--init-method-xavier-uniform",
        "a residual is the input of its norm. Remove it.": "--apply-residual-connection-post-layernorm",
        "the vocabulary is that of the tokenizer; --padded-vocab-size adds rows. Remove it.": "--vocab-extra-ids",
        "a spike of the loss or of a gradient does not end a run. Remove it.": "--check-for-large-grads --check-for-spiky-loss",
        "no batch is left out. Remove it.": "--iterations-to-skip --skip-train-iteration-range",
        "write --save-interval and --save-retain-interval, which deletes earlier checkpoints.": "--non-persistent-ckpt-type --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-algo "
        "--non-persistent-local-ckpt-dir --non-persistent-save-interval --persistent-save-interval",
        "megatron-ds convert converts checkpoints. Remove it.": "--ckpt-convert-format --ckpt-convert-save --ckpt-convert-update-legacy-dist-opt-format",
        "the newest checkpoint is loaded, whose step the tracker file names. Write the step there.": "--ckpt-step --load-tag",
        "optimizer state is in fp32, or in the dtype of weights without masters. Remove it.": "--use-bnb-optimizer",
        "the embedding has the dtype of the weights. Remove it.": "--embedding-weights-in-fp32",
    },
    only={
        "--mid-level-dataset-surplus": Answer(
            "each corpus of a blend has that many more samples",
            "each corpus of a blend has 0.5 % more samples than its share. Remove it.",
            ("0.005", *OFF),
        ),
        "--remote-device": Answer(
            "weights stay on the device",
            "write --zero-stage 3 --offload-param cpu or nvme.",
            ("none", *OFF),
        ),
    },
)
