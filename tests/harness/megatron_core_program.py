"""Train and save tiny GPTs and BERTs with megatron-core on CPUs: the foreign program of the conversion tests.

A server, since importing megatron-core takes seconds: it reads a job as a line of JSON from standard input,
forks its ranks, and answers with a line "done" or "failed". A job:

    ranks, tp, pp, ep layout; the rest of the ranks are data-parallel
    vp                chunks of the model on each pipeline rank
    model             arguments of TransformerConfig and GPTModel
    dtype             of the weights: float32 or bfloat16
    distributed       whether the optimizer is megatron-core's distributed one
    load              folder of a torch_dist checkpoint with optimizer state to start from; or null
    steps             training steps before saving, each on the next of the batches in `batches`
    batches           file of [{name: tensor [samples, ..]} of each step]; first_batch: where the run begins
    saves             [format, folder, sharding of the optimizer state] …
    after             folder for rank{r}.pt: {"saved" weights, then of one more step "logits" (with pp = 1)
                      and "terms" of the loss (of each micro-batch, on the last stage) before it, "weights"
                      after it}

Nothing heavy is imported at the top, because megatron-core's writer may start this file again.
"""

import faulthandler
import json
import os
import sys
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tests.harness import megatron_core_files as files
from tests.harness import megatron_core_models as models


def main() -> None:
    warnings.filterwarnings("ignore")
    import torch
    from megatron.core import dist_checkpointing, parallel_state  # noqa: F401  imported once, before forks
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: F401
    from megatron.core.optimizer import get_megatron_optimizer  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        ranks = [forked(job["timeout"], run, job, rank) for rank in range(job["ranks"])]
        failed = [os.waitpid(pid, 0)[1] for pid in ranks]
        print("failed" if any(failed) else "done", flush=True)


def forked(timeout: float, function, *args) -> int:
    """The number of a process that calls the function and ends, with code 0 unless it raises. timeout: seconds"""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    faulthandler.dump_traceback_later(timeout, exit=True)
    try:
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run(job: dict, rank: int) -> None:
    import torch

    store = torch.distributed.FileStore(job["store"], job["ranks"])
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=job["ranks"]
    )
    with without_gpu():
        train(job, rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@contextmanager
def without_gpu():
    """megatron-core as if the CPU were its GPU."""
    import queue

    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = "cpu"
            if function is torch.Tensor.type and len(args) == 1:
                return str(function(*args)).replace("torch.", "torch.cuda.")
            if function is torch.Tensor.cuda:
                return args[0]
            return function(*args, **kwargs)

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *_: None
    moe_utils.te_general_gemm = None  # undefined without TransformerEngine
    random.CudaRNGStatesTracker.fork = lambda self, *_: nullcontext()
    filesystem_async._process_memory = lambda: 0  # it needs psutil
    results = queue.Queue()
    filesystem_async._get_write_results_queue = lambda: results
    with OnCpu():
        yield


def train(job: dict, rank: int) -> None:
    import torch
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        job["tp"],
        job["pp"],
        expert_model_parallel_size=job["ep"],
        virtual_pipeline_model_parallel_size=job["vp"] if job["vp"] > 1 else None,
    )
    model, optimizer = models.make(job)
    batches = torch.load(job["batches"])[job.get("first_batch", 0) :]
    if job["load"]:
        models.train_step(
            model, optimizer, batches[0]
        )  # makes state, as torch's Adam needs it
        files.load(job, model, optimizer)
    for step in range(job["steps"]):
        models.train_step(model, optimizer, batches[step])
    for format, folder, sharding in job["saves"]:
        save = {"torch": files.save_torch, "torch_dist": files.save_torch_dist}[format]
        save(job, model, optimizer, folder, sharding)
    after, batch = {"saved": weights_of(model)}, batches[job["steps"]]
    # With further depths megatron-core computes no logits without labels.
    if job["pp"] == 1 and not job["model"].get("mtp_num_layers"):
        after["logits"] = models.logits_of(model[0], batch)
    after["terms"] = models.train_step(model, optimizer, batch)
    after["weights"] = weights_of(model)
    Path(job["after"]).mkdir(parents=True, exist_ok=True)
    torch.save(after, f"{job['after']}/rank{rank}.pt")


def weights_of(chunks) -> dict:
    """Layers are numbered from 0 in each chunk; names of chunks after the first begin with its number."""
    return {
        f"{number}." * (number > 0) + name: p.detach().clone()
        for number, chunk in enumerate(chunks)
        for name, p in chunk.module.named_parameters()
    }


if __name__ == "__main__":
    main()
