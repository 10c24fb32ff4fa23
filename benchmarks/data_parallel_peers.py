"""Data-parallel contestants that split state: DDP with ZeroRedundancyOptimizer, FSDP2 and DeepSpeed ZeRO, on
gloo processes.

    pip install deepspeed==0.19.8         # only for the contestants `deepspeed:0` to `deepspeed:3[+cpu_adam]`

Each is set for speed: gradients synchronised once a step where the peer can, weights gathered one block
ahead, fused AdamW. What a peer sends and keeps follows from that: `fsdp2:2` keeps its weights from the first
forward to the last backward of a step, `fsdp2:3` frees them after each use; DeepSpeed's stages 2 and 3 reduce
every micro-batch.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from contestants import PlainGPT, Step, adamw_groups, plain_adamw, plain_step
from torch import nn
from workloads import (
    BETAS,
    CLIP,
    EPS,
    LEARNING_RATE,
    NUM_BATCHES,
    Workload,
    token_batches,
)


def ddp_zero(w: Workload, rank: int, world: int, dtype: str) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = PlainGPT(w)
    net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        adamw_groups(model),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
        fused=True,
    )
    return plain_step(w, rank, world, net, optimizer, dtype)


def fsdp2(w: Workload, rank: int, world: int, dtype: str, stage: int) -> Step:
    """stage 2 or 3.

    fp32 shards and gradients; with bf16 the gathered weights and the activations have 16 bits.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if dtype == "bf16"
        else None
    )
    options = dict(
        mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=stage == 3
    )
    if policy is not None:
        options["mp_policy"] = policy
    net = PlainGPT(w)
    blocks = list(net.blocks)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(net, **options)
    # There are no streams on a CPU: only a gather that is asynchronous and asked for a block ahead hides
    # behind compute.
    net._set_unshard_async_op(True)
    for block, following in zip(blocks, blocks[1:]):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    optimizer = plain_adamw(net)

    @contextlib.contextmanager
    def microbatch(is_last: bool):
        net.set_requires_gradient_sync(is_last)
        net.set_is_last_backward(is_last)
        net.set_reshard_after_backward(is_last or stage == 3)
        yield

    # the policy casts
    return plain_step(
        w, rank, world, net, optimizer, "fp32", microbatch, keep_gradients=False
    )


def zero(
    w: Workload, rank: int, world: int, dtype: str, stage: int, cpu_adam: bool
) -> Step:
    """DeepSpeed. bf16: weights, gradients and activations of 16 bits, fp32 masters."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it sets its own
    share = w.global_batch // world
    model = PlainGPT(w)
    numel = sum(p.numel() for p in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": w.micro_batch,
        "gradient_accumulation_steps": share // w.micro_batch,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": numel,
            "allgather_bucket_size": numel,
            "overlap_comm": False,
            "contiguous_gradients": True,
        },
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
        model = model.to(torch.bfloat16)
    optimizer = _cpu_adam(model) if cpu_adam else plain_adamw(model)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = torch.from_numpy(token_batches(w))

    def step(i: int) -> float:
        total = torch.zeros(())
        mine = data[i % NUM_BATCHES][rank * share : (rank + 1) * share].split(
            w.micro_batch
        )
        for rows in mine:
            loss = engine(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / (len(mine) * world)
        if world > 1:
            dist.all_reduce(total)
        return total.item()

    return step


def _cpu_adam(model: nn.Module) -> torch.optim.Optimizer:
    """It compiles itself at the first use."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(
        adamw_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS, adamw_mode=True
    )
