"""The layer with experts of megatron-core, of each rank of the jobs in a folder, on CPUs over gloo.

python -m tests.harness.megatron_experts FOLDER

Reads jobs.json, [{"name", "tp", "ep", "etp", "dispatcher", "shared"}, …], all of RANKS ranks, and writes
NAME_RANK.pt: {"ranks": {axes: ranks of its group}, "input", "factor", "output" [s/tp, b, h], "gradients": {name of
ours: tensor}}, where the loss is the sum of output times factor. The layer is megatron-core's own: router,
dispatcher, experts and groups. Only what names the device is replaced: `without_gpu`; streams, of which a CPU has
none; and the copy of row counts to the host, which leaves tensors of a CPU as they are, where gloo and `torch.split`
want numbers. A layer alone has no norm, so torch's norms, which megatron-core does not use with sequence parallelism,
are not in the way.

Inputs and weights are functions of a seed, `inputs_of` and `weights_of`, that the other side calls too.
"""

import json
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

RANKS = 4
HIDDEN = 32
FFN = 24
SHARED = 16
EXPERTS = 8
TOP = 2
SEQUENCE = 12
SAMPLES = 3
TIMEOUT = 120  # seconds


def weights_of(has_shared: bool) -> dict:
    """Whole weights, by names of ours: gate and up in the first and second half of fc1."""
    import torch

    draw = torch.Generator().manual_seed(11)
    shapes = {
        "router.weight": (EXPERTS, HIDDEN),
        "experts.linear_fc1.weight": (EXPERTS, 2 * FFN, HIDDEN),
        "experts.linear_fc2.weight": (EXPERTS, HIDDEN, FFN),
    }
    if has_shared:
        shapes["shared_experts.linear_fc1.weight"] = (2 * SHARED, HIDDEN)
        shapes["shared_experts.linear_fc2.weight"] = (HIDDEN, SHARED)
    return {
        name: torch.randn(shape, generator=draw) * (2 / shape[-1]) ** 0.5
        for name, shape in shapes.items()
    }


def inputs_of(data_rank: int, tp_rank: int, tp: int) -> list:
    """[input, factor of the output], each [s/tp, b, h], of the rank."""
    import torch

    draw = torch.Generator().manual_seed(100 + data_rank)
    whole = torch.randn(2, SEQUENCE, SAMPLES, HIDDEN, generator=draw)
    return [each.chunk(tp)[tp_rank].clone() for each in whole]


@contextmanager
def without_streams():
    """One stream, in which everything runs at once, and a host that holds all tensors."""
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    class AtOnce:
        def wait_stream(self, _):
            pass

        def synchronize(self):
            pass

        def record_event(self):
            return self

    from tests.harness.megatron_core_program import without_gpu

    def counts(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    only = AtOnce()
    token_dispatcher.maybe_move_tensor_to_cpu = counts
    with without_gpu():
        torch.cuda.Stream = lambda *_: only
        torch.cuda.current_stream = lambda *_: only
        torch.cuda.stream = lambda _: nullcontext()
        yield


def layer_of(job: dict):
    """megatron-core's layer, with weights that nothing has set."""
    import torch
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOP,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_token_dispatcher_type=job["dispatcher"],
        moe_shared_expert_intermediate_size=SHARED if job["shared"] else None,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        sequence_parallel=job["tp"] > 1,
        tensor_model_parallel_size=job["tp"],
        expert_model_parallel_size=job["ep"],
        expert_tensor_parallel_size=job["etp"],
    )
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    return MoELayer(config, spec.submodules)


def part_of(whole, gated: bool, rank: int, size: int):
    """The rows of fc1, or the columns of fc2, that a rank holds."""
    import torch

    if not gated:
        return whole.chunk(size, dim=1)[rank]
    return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])


def parameters_of(layer, weights: dict) -> dict:
    """{name of ours: [(parameter, its values)]}; of experts those that this rank holds, in their order."""
    from megatron.core import parallel_state as groups

    found = {"router.weight": [(layer.router.weight, weights["router.weight"])]}
    etp = (
        groups.get_expert_tensor_parallel_rank(),
        groups.get_expert_tensor_parallel_world_size(),
    )
    tp = (
        groups.get_tensor_model_parallel_rank(),
        groups.get_tensor_model_parallel_world_size(),
    )
    for linear in ("linear_fc1", "linear_fc2"):
        gated = linear == "linear_fc1"
        name = f"experts.{linear}.weight"
        found[name] = [
            (
                getattr(expert, linear).weight,
                part_of(weights[name][number], gated, *etp),
            )
            for number, expert in zip(
                layer.local_expert_indices, layer.experts.local_experts
            )
        ]
        name = f"shared_{name}"
        if name in weights:
            parameter = getattr(layer.shared_experts, linear).weight
            found[name] = [(parameter, part_of(weights[name], gated, *tp))]
    return found


def run(job: dict, rank: int) -> dict:
    import torch
    from megatron.core import parallel_state as groups

    groups.initialize_model_parallel(
        job["tp"],
        expert_model_parallel_size=job["ep"],
        expert_tensor_parallel_size=job["etp"],
    )
    layer = layer_of(job)
    held = parameters_of(layer, weights_of(job["shared"]))
    with torch.no_grad():
        for parameter, values in (pair for pairs in held.values() for pair in pairs):
            parameter.copy_(values)
    x, factor = inputs_of(
        groups.get_data_parallel_rank(),
        groups.get_tensor_model_parallel_rank(),
        job["tp"],
    )
    x.requires_grad_()
    output, _ = layer(x)
    (output * factor).sum().backward()
    gradients = {
        name: torch.stack([parameter.grad for parameter, _ in pairs])
        for name, pairs in held.items()
    }
    ranks = torch.distributed.get_process_group_ranks
    found = {
        "ranks": {
            "tp": ranks(groups.get_tensor_model_parallel_group()),
            "ep": ranks(groups.get_expert_model_parallel_group()),
            "etp": ranks(groups.get_expert_tensor_parallel_group()),
        },
        "input": x.detach(),
        "factor": factor,
        "output": output.detach(),
        "gradients": {
            name: g if name.startswith("experts.") else g[0]
            for name, g in gradients.items()
        }
        | {"input": x.grad},
    }
    groups.destroy_model_parallel()
    return found


def serve(folder: Path, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), RANKS)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS
    )
    with without_streams():
        for job in json.loads((folder / "jobs.json").read_text()):
            torch.save(run(job, rank), folder / f"{job['name']}_{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(folder: Path) -> int:
    """0 if every rank has ended well."""
    from megatron.core import parallel_state  # noqa: F401  imported once, before forks
    from megatron.core.models.gpt import moe_module_specs  # noqa: F401

    from tests.harness.megatron_core_program import forked

    started = [forked(TIMEOUT, serve, folder, rank) for rank in range(RANKS)]
    return any([os.waitpid(pid, 0)[1] for pid in started])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
