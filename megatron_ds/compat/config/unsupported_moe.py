"""Flags of Megatron and Megatron-DeepSpeed about layers with experts that have no option here."""

from ...config.sources.answers import Answer, table

MOE_FLAGS = table(
    accepted={
        "the experts of a rank are always computed together, one after another or by one grouped kernel": "--moe-grouped-gemm --moe-single-grouped-bias --moe-single-grouped-weight "
        "--moe-use-grouped-tensor --moe-use-legacy-grouped-gemm --use-grouped-gemm-for-shared-expert",
        "tokens are sent to the ranks of their experts by one all-to-all, and back by another": "--moe-token-dispatcher-type --use-tutel",
        "no effect yet: tokens are sent by the all-to-all of torch.distributed, not by DeepEP or HybridEP": "--moe-deepep-num-sms --moe-enable-deepep --moe-flex-dispatcher-backend "
        "--moe-flex-dispatcher-num-sms --moe-hybridep-num-blocks-permute "
        "--moe-hybridep-num-blocks-unpermute --moe-hybridep-num-sms --moe-hybridep-num-sms-preprocessing "
        "--moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-zero-copy "
        "--moe-permute-fusion-into-hybridep",
        "kernels are chosen by what the device supports": "--moe-permute-fusion",
        "no effect yet: the router consists of torch's operations": "--moe-router-fusion",
        "the shared experts always compute while tokens are sent": "--moe-shared-expert-overlap",
        "no effect yet: only the shared experts compute while tokens are sent": "--overlap-dispatch-backward-with-experts-wgrad "
        "--overlap-moe-expert-parallel-comm",
        "ZeRO always reduces experts apart from the other parameters": "--create-moe-param-group",
        "always logged": "--moe-per-layer-logging",
        "tensor-parallel ranks split every expert, unless --expert-tensor-parallel-size leaves them whole": "--enable-expert-tensor-parallelism",
        "the second expert is always the second best": "--disable-moe-top2-2nd-expert-sampling",
        "rows need padding for fp8 only": "--moe-router-padding-for-fp8 "
        "--moe-router-padding-for-quantization",
        "it applies to inference only": "--moe-pad-experts-for-cuda-graph-inference",
    },
    refused={
        "the router always chooses the experts. Remove it.": "--moe-router-force-biased --moe-router-force-load-balancing",
        "choices of the router are not recorded. Remove it.": "--moe-enable-routing-replay --moe-routing-trace-max-inference-steps --moe-routing-trace-path",
        "write --moe-router-num-groups and --moe-router-group-topk.": "--moe-router-topk-limited-devices",
        "the routing weight multiplies the output of an expert. Remove it.": "--moe-apply-probs-on-input",
        "experts work in the width of the model. Remove it.": "--moe-latent-size",
        "the capacity is that of an expert, not of a rank: write --moe-expert-capacity-factor.": "--moe-expert-rank-capacity-factor",
        "megatron-ds upcycle makes experts of a dense checkpoint. Load its result, and remove this.": "--moe-upcycling-granularity --moe-use-upcycling",
        "write --recompute-granularity full, which recomputes whole layers.": "--moe-layer-recompute",
        "activations of experts stay on the device. Remove it.": "--moe-paged-stash --moe-paged-stash-buffer-size-factor-cpu "
        "--moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-page-size",
        "gate and up projection are two halves of the weight, not interleaved. Remove it.": "--moe-mlp-glu-interleave-size --moe-shared-expert-glu-interleave-size",
        "the load is balanced by --moe-router-load-balancing-type or --moe-router-enable-expert-bias. Remove "
        "it.": "--moe-router-quantile-balancing-ema",
        "every expert is split over the ranks of --expert-tensor-parallel-size. Remove it.": "--expert-gtp-weight-remat-size --expert-tensor-parallel-num-weight-shards --moe-extended-tp",
        "write --num-experts N --moe-router-topk 1 --moe-router-pre-softmax.": "--num-experts-switch",
    },
    only={
        flag: Answer(
            "tokens are sent in the dtype of the weights",
            "tokens are sent in the dtype of the weights. Remove it.",
            ("bf16", None, "auto"),
        )
        for flag in ("--moe-dispatch-fwd-dtype", "--moe-combine-bwd-dtype")
    },
)
