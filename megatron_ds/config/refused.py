"""Flags of Megatron-LM and Megatron-DeepSpeed that would change nothing here → why, and what to write instead.

A flag that is accepted has an effect. Scripts arrive with these, so each is answered by more than "unknown".
"""

from types import MappingProxyType

_ONE_MODEL = "there is one implementation of the model. Remove it."
_ALWAYS = "that is how it always works. Remove it."
_ASYNC = "its all-reduce always overlaps with the weight gradient. Remove it."
_KERNEL = "kernels are chosen by what the device can do. Remove it."
_RNG = "a checkpoint holds no random state, since every random number follows from --seed and its place. Remove it."
_PLAIN_RNG = "initial weights and dropout follow from --seed alone, the same on every layout. Remove it."

REFUSED_FLAGS = MappingProxyType({
    "--accumulate-allreduce-grads-in-fp32": "gradients are always accumulated and reduced in fp32. Remove it.",
    "--apply-query-key-layer-scaling": "core attention works in fp32 inside, so scores need no second scaling. Remove it.",
    "--async-tensor-model-parallel-allreduce": _ASYNC,
    "--attention-backend": _KERNEL,
    "--attention-softmax-in-fp32": _ALWAYS,
    "--ckpt-format": "there is one format, which loads at any layout. Remove it.",
    "--data-impl": "there is one format of data, .bin/.idx. Remove it.",
    "--dataset-impl": "there is one format of data, .bin/.idx. Remove it.",
    "--ddp-backend": "gradients are reduced from flat buffers, whatever --zero-stage says. Remove it.",
    "--DDP-impl": "gradients are reduced from flat buffers, whatever --zero-stage says. Remove it.",
    "--deepspeed": "--deepspeed_config alone is enough. Remove it.",
    "--deepspeed-mpi": "the launcher is recognised by itself. Remove it.",
    "--dist-ckpt-format": "there is one format, which loads at any layout. Remove it.",
    "--distributed-backend": "it is NCCL on CUDA devices and gloo elsewhere. Remove it.",
    "--distributed-timeout": "write --distributed-timeout-minutes.",
    "--exit-signal-handler": "the run always saves and exits on the --exit-signals. Remove it.",
    "--fp32-residual-connection": "residuals are added in the format of the weights. Remove it.",
    "--local-rank": "the launcher's environment says it. Remove it.",
    "--no-async-tensor-model-parallel-allreduce": _ASYNC,
    "--no-bias-dropout-fusion": _KERNEL,
    "--no-bias-gelu-fusion": _KERNEL,
    "--no-create-attention-mask-in-dataloader": _ALWAYS,
    "--no-gradient-accumulation-fusion": _KERNEL,
    "--no-load-rng": _RNG,
    "--no-masked-softmax-fusion": _KERNEL,
    "--no-mmap-bin-files": "data files are always mapped. Remove it.",
    "--no-pipeline-parallel": "write --pipeline-model-parallel-size 1, the default.",
    "--no-query-key-layer-scaling": "that is the default. Remove it.",
    "--no-save-rng": _RNG,
    "--num-layers-per-virtual-pipeline-stage": "interleaved schedules are not available yet. Remove it.",
    "--num-layers-per-stage": "write --pipeline-layout, such as 3,2,3.",
    "--overlap-param-gather": "weights are gathered right after the step. Remove it.",
    "--override-opt-param-scheduler": "the learning rate is a function of the flags and of progress, never stored. Remove it.",
    "--pipeline-model-parallel-layout": "write --pipeline-layout with the decoder layers of each stage, such as 3,2,3.",
    "--pipeline-model-parallel-split-rank": "there are no encoder-decoder models. Remove it.",
    "--data-parallel-random-init": _PLAIN_RNG,
    "--tensorboard-log-interval": "TensorBoard gets a point at each --log-interval. Remove it.",
    "--transformer-impl": _ONE_MODEL,
    "--use-checkpoint-opt-param-scheduler": "the learning rate is a function of the flags and of progress, never stored. "
                                            "Remove it.",
    "--use-cpu-initialization": _PLAIN_RNG,
    "--use-dist-ckpt": "there is one format, which loads at any layout. Remove it.",
    "--use-flash-attn": _KERNEL,
    "--use-flash-attn-v2": _KERNEL,
    "--use-legacy-models": _ONE_MODEL,
    "--use-mcore-models": _ONE_MODEL,
    "--use-torch-fsdp2": "write --zero-stage.",
    "--virtual-pipeline-model-parallel-size": "interleaved schedules are not available yet. Remove it.",
    "--world-size": "the launcher says how many ranks there are. Remove it.",
})
