"""Checkpoints that DeepSpeed wrote, and what it computes after it read ours. A program of 2 or 4 ranks on
gloo:

    python -m tests.harness.deepspeed_runs make FOLDER           all of `CASES`: FOLDER/CASE/…, CASE/next.pt
    python -m tests.harness.deepspeed_runs read CASE UNIVERSAL OUT

next.pt0, next.pt1, … and OUT0, OUT1, …, of each rank, hold the weights of the checkpoint as DeepSpeed shows
them ("before"), the loss of the next step, of all ranks together, the logits in it, and the weights after it.
"""

import importlib
import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist

from tests.harness import deepspeed_modules as modules
from tests.harness.deepspeed_modules import loss_of, tokens_of

STEPS = 2
FP16, BF16 = (
    {"fp16": {"enabled": True, "initial_scale_power": 8}},
    {"bf16": {"enabled": True}},
)
FP32_GRADS = {"data_types": {"grad_accum_dtype": "fp32"}}
# name → (module, ZeRO stage, precision)
CASES = {
    **{f"small{stage}": (modules.Small, stage, {}) for stage in (0, 2, 3)},
    "small0_fp16": (modules.Small, 0, FP16),
    "small1_fp16": (modules.Small, 1, FP16),
    "small3_bf16": (modules.Small, 3, BF16),
    "small1_bf16_fp32": (modules.Small, 1, BF16 | FP32_GRADS),
    "llama1": (modules.HfLlama, 1, {}),
    "llama3": (modules.HfLlama, 3, {}),
    "mds_pipe1": ("pipe", 0, {}),
    "mds_pipe2_bf16": ("pipe2", 1, BF16 | FP32_GRADS),
    **{f"experts{stage}": ("experts", stage, {}) for stage in (0, 1)},
    "experts0_fp16": ("experts", 0, FP16),
    "experts2_bf16": ("experts", 2, BF16),
}


def ranks_of(case: str) -> int:
    """Experts are divided over 2 of 4 data-parallel ranks."""
    return 4 if case.startswith("experts") else 2


def vocab_of(case: str) -> int:
    """Number of token ids."""
    return 11 if case.startswith(("small", "experts")) else modules.VOCAB


def config_of(stage: int, precision: dict) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 0.01,
                "weight_decay": 0.1,
                "eps": 1e-4,
                "torch_adam": True,
            },
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_max_lr": 0.01,
                "warmup_num_steps": 8,
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {
            "stage": stage,
            **({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
        },
        **precision,
    }


def groups_of(model) -> list[dict]:
    """Matrices with weight decay, vectors without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


def pipeline(stages: int):
    """The list of layers of Megatron-DeepSpeed, with its names."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    head = lambda embedding, x: x @ embedding.word_embeddings.weight.T
    tied = lambda forward=None: TiedLayerSpec(
        "embed",
        modules.MdsEmbedding,
        forward_fn=forward,
        tied_weight_attr="word_embeddings_weight",
    )
    layers = [
        lambda tokens: tokens,
        tied(),
        *(LayerSpec(modules.MdsBlock, i) for i in range(modules.LAYERS)),
        LayerSpec(modules.MdsNorm),
        tied(head),
    ]
    return PipelineModule(
        layers=layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform"
    )


def engine_of(case: str, universal: bool = False):
    import deepspeed

    kind, stage, precision = CASES[case]
    torch.manual_seed(3)
    config = config_of(stage, precision) | (
        {"checkpoint": {"load_universal": True}} if universal else {}
    )
    if kind == "experts":
        model = modules.Routed(importlib.import_module("deepspeed.moe.layer").MoE)
        config["gradient_clipping"] = (
            0.0  # DeepSpeed's norm counts experts as if all ranks had the same
        )
    else:
        model = pipeline(int(kind[4:] or 1)) if isinstance(kind, str) else kind()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=with_moe_groups(groups_of(model)), config=config
    )
    return engine, isinstance(kind, str) and kind != "experts"


def with_moe_groups(groups: list[dict]) -> list[dict]:
    """The groups with those of experts apart, as ZeRO needs them."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    named = [{"name": f"group {g}", **group} for g, group in enumerate(groups)]
    divided = split_params_into_different_moe_groups_for_optimizer(named)
    return divided if any(group.get("moe") for group in divided) else groups


def train(
    engine, is_pipeline: bool, step: int, vocab: int
) -> tuple[float, torch.Tensor | None]:
    """(mean loss of all ranks, logits of this rank)."""
    world = dist.get_world_size()
    if is_pipeline:
        ranks = world // engine.module.num_stages
        tokens = tokens_of(step, engine.grid.get_data_parallel_rank(), ranks, vocab)
        return float(engine.train_batch(iter([(tokens[:, :-1], tokens)]))), None
    tokens = tokens_of(step, dist.get_rank(), world, vocab)
    logits = engine(tokens[:, :-1])
    loss = loss_of(logits, tokens)
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total / world), logits.detach().float()


def whole_weights(engine) -> dict[str, torch.Tensor]:
    """The trained weights in fp32 as DeepSpeed shows them; as the module holds them at stage 0."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, p in engine.module.named_parameters():
        if p.requires_grad:
            in_fp32 = hasattr(p, "_hp_mapping") or hasattr(p, "ds_id")
            name = modules.global_name(name, dist.get_rank())
            found[name] = (
                safe_get_full_fp32_param(p) if in_fp32 else p.detach().float()
            ).clone()
    return found


def rest(engine, is_pipeline: bool, vocab: int, out: Path) -> None:
    """The weights now, and the next step, into a file of each rank."""
    before = whole_weights(engine)
    loss, logits = train(engine, is_pipeline, STEPS, vocab)
    torch.save(
        {
            "loss": loss,
            "logits": logits,
            "before": before,
            "after": whole_weights(engine),
        },
        out.with_name(f"{out.name}{dist.get_rank()}"),
    )


def make(folder: Path, cases: list[str]) -> None:
    for case in cases:
        engine, is_pipeline = engine_of(case)
        vocab = vocab_of(case)
        for step in range(STEPS):
            train(engine, is_pipeline, step, vocab)
        info = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}}
        info = (
            {} if case.startswith("experts") else info
        )  # DeepSpeed refuses that key there
        args = {"args": Namespace(**modules.MDS_ARGUMENTS)} if is_pipeline else {}
        engine.save_checkpoint(
            str(folder / case), client_state={"iteration": STEPS, **args, **info}
        )
        rest(engine, is_pipeline, vocab, folder / case / "next.pt")


def read(case: str, folder: Path, out: Path) -> None:
    engine, is_pipeline = engine_of(case, universal=True)
    path, _ = engine.load_checkpoint(str(folder))
    assert path is not None
    rest(engine, is_pipeline, vocab_of(case), out)


def main(rank: int, ranks: int, port: int, verb: str, words: list[str]) -> None:
    """A rank of all cases that need as many."""
    import deepspeed

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    if verb == "make":
        make(
            Path(words[0]),
            [case for case in words[1:] or CASES if ranks_of(case) == ranks],
        )
    else:
        for case, folder, out in zip(words[::3], words[1::3], words[2::3]):
            read(case, Path(folder), Path(out))
    dist.destroy_process_group()


def fork(*arguments) -> int:
    """The process of a rank."""
    pid = os.fork()
    if pid:
        return pid
    try:
        main(*arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    import torch._dynamo  # as torch's optimizers do, in every rank

    torch.compile = lambda *_, **__: (
        lambda function: function
    )  # of Muon, unused here; it takes seconds
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401  imports are done once
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # slow on some processors
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: (
        None
    )  # it compiles for minutes
    port, verb, words = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    cases = words[1:] or list(CASES) if verb == "make" else words[::3]
    for ranks in sorted({ranks_of(case) for case in cases}):
        pids = [fork(rank, ranks, port, verb, words) for rank in range(ranks)]
        if any([os.waitpid(pid, 0)[1] for pid in pids]):
            sys.exit(1)
