"""A layer with experts beside its peers: forward and backward, same weights and tokens, in turns.

    python benchmarks/moe_peers.py                                   # one process, two threads
    python benchmarks/moe_peers.py --contestants ours mcore:alltoall mcore:allgather --ranks 2
    python benchmarks/moe_peers.py --contestants model hf-model:grouped_mm hf-model:eager
    python benchmarks/moe_peers.py --contestants ours hf:grouped_mm --dtype bf16
    python benchmarks/moe_peers.py --shape tiny --contestants model hf-model:grouped_mm hf-model:batched_mm

    ours                our layer; on several ranks the experts are divided over them (EP)
    dense               our dense feed-forward of the same active width, k times that of an expert
    hf:IMPLEMENTATION   the sparse block of Mixtral in transformers: eager, grouped_mm or batched_mm
    mcore:DISPATCHER    the MoE layer of megatron-core with its sequential experts: allgather or alltoall
    model, hf-model:…   a whole Mixtral of four layers, with its loss

batched_mm copies the weights of its expert for each slot of a token, so it needs shape tiny.

All contestants live in the same processes and take their steps in turn; every step is compared with the
step of the first contestant beside it, by the clock and by the processor time of all ranks, which other
programs on the machine disturb less. Before that their results, the gradients of their inputs and of one
expert are compared with those of the first; they must agree within rounding (not those of `dense`, another
function). In bf16 weights and numbers are bf16, and a router that rounds its scores chooses other experts for a few
tokens: then only most of the result must agree. Processors without AVX-512 BF16 or AMX have no products of
bf16, and torch's take a hundred times as long there.

No contestant computes a load balancing loss; ours also computes its statistics of the load.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = 2e-5  # of each number, relative to the largest
TOLERANCE_OF_MOST = 0.2  # in bf16: of the norm of all


@dataclass(frozen=True)
class Shape:
    """batch is that of each rank; vocab is that of a whole model; dtype of weights and results."""

    hidden: int
    ffn: int
    experts: int
    k: int
    batch: int
    seq: int
    vocab: int = 8192
    dtype: torch.dtype = torch.float32


SHAPES = {
    "tiny": Shape(hidden=128, ffn=256, experts=8, k=2, batch=2, seq=128, vocab=1024),
    "S": Shape(hidden=256, ffn=512, experts=8, k=2, batch=4, seq=256),
    "M": Shape(hidden=512, ffn=1792, experts=8, k=2, batch=2, seq=512),
    "fine": Shape(hidden=256, ffn=128, experts=64, k=8, batch=4, seq=256),
}


@dataclass
class Contestant:
    """forward: x [s, b, h] → the result of the same shape, or a scalar. parameters: those that get gradients.

    first_expert: the gradient of the down projection of expert 0, on rank 0.
    """

    forward: Callable[[torch.Tensor], torch.Tensor]
    parameters: list[torch.nn.Parameter]
    first_expert: Callable[[], torch.Tensor] | None = None

    def step(
        self, x: torch.Tensor, dy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for parameter in self.parameters:
            parameter.grad = None
        x = x.detach().requires_grad_()
        y = self.forward(x)
        y.backward(dy if y.dim() else None)
        return y.detach(), x.grad


def values_of(shape: Shape) -> dict[str, torch.Tensor]:
    """Router [E, h], gate and up [E, 2 f, h], down [E, h, f]."""
    draw = torch.Generator().manual_seed(1)
    e = shape.experts
    h = shape.hidden
    f = shape.ffn
    normal = lambda *size, std: torch.randn(*size, generator=draw) * std
    return {
        "router": normal(e, h, std=0.2),
        "up": normal(e, 2 * f, h, std=h**-0.5),
        "down": normal(e, h, f, std=f**-0.5),
    }


def fill(pairs) -> None:
    with torch.no_grad():
        for parameter, value in pairs:
            parameter.copy_(value)


# ----------------------------------------------------------------------------------------------------- ours
def our_config(shape: Shape, **changes):
    from megatron_ds.config.options.model import ModelConfig

    return ModelConfig(
        **dict(
            num_layers=4,
            hidden_size=shape.hidden,
            num_attention_heads=8,
            seq_length=shape.seq,
            vocab_size=shape.vocab,
            ffn_hidden_size=shape.ffn,
            activation="swiglu",
            add_bias_linear=False,
            normalization="RMSNorm",
            position_embedding_type="rope",
            untie_embeddings_and_output_weights=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            num_experts=(shape.experts,),
            moe_router_topk=shape.k,
        )
        | changes
    )


def our_context(rank: int, ranks: int, dtype: torch.dtype):
    from megatron_ds.mpu.context import ParallelContext
    from megatron_ds.mpu.grid import Grid
    from megatron_ds.mpu.mesh import Mesh
    from megatron_ds.mpu.process_groups import connect_torch

    cpu = torch.device("cpu")
    mesh = (
        Mesh(Grid(dp=ranks, ep=ranks), rank, connect_torch, cpu) if ranks > 1 else None
    )
    return ParallelContext(mesh, dtype=dtype, device=cpu)


def our_batch(shape: Shape, ids: torch.Tensor | None = None):
    from megatron_ds.batch.batch import Batch
    from megatron_ds.batch.ledger import DISCARDING

    b = shape.batch
    s = shape.seq
    ids = torch.zeros(b, s, dtype=torch.int64) if ids is None else ids
    return Batch(
        ids,
        ids.roll(-1, 1),
        torch.ones(b, s),
        torch.arange(s).expand(b, s),
        sample_ids=tuple(range(b)),
        ledger=DISCARDING,
    )


def ours(shape: Shape, rank: int, ranks: int, kind: str) -> Contestant:
    from megatron_ds.moe.mixture import MixtureOfExperts

    layer = MixtureOfExperts(
        our_config(shape),
        shape.experts,
        "decoder.layers.0.mlp",
        our_context(rank, ranks, shape.dtype),
        output_std=0.02,
    )
    values = values_of(shape)
    local = shape.experts // ranks
    mine = slice(rank * local, (rank + 1) * local)
    one = layer.experts.linear_fc1.weight
    two = layer.experts.linear_fc2.weight
    fill(
        [
            (layer.router.weight, values["router"]),
            (one, values["up"][mine]),
            (two, values["down"][mine]),
        ]
    )
    batch = our_batch(shape)
    return Contestant(
        lambda x: layer(x, batch), list(layer.parameters()), lambda: two.grad[0]
    )


def dense(shape: Shape, rank: int, ranks: int, kind: str) -> Contestant:
    from megatron_ds.models.block import MLP

    layer = MLP(
        our_config(shape, ffn_hidden_size=shape.k * shape.ffn, num_experts=None),
        "mlp",
        our_context(0, 1, shape.dtype),
        output_std=0.02,
    )
    batch = our_batch(shape)
    return Contestant(lambda x: layer(x, batch), list(layer.parameters()))


# --------------------------------------------------------------------------------------------- transformers
def hf_config(shape: Shape, kind: str):
    from transformers import MixtralConfig

    config = MixtralConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=shape.vocab,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.k,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        max_position_embeddings=shape.seq,
        router_jitter_noise=0.0,
        use_cache=False,
    )
    config._experts_implementation = kind
    config._attn_implementation = "sdpa"
    return config


def hf(shape: Shape, rank: int, ranks: int, kind: str) -> Contestant:
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    layer = MixtralSparseMoeBlock(hf_config(shape, kind)).to(shape.dtype)
    values = values_of(shape)
    down = layer.experts.down_proj
    fill(
        [
            (layer.gate.weight, values["router"]),
            (layer.experts.gate_up_proj, values["up"]),
            (down, values["down"]),
        ]
    )
    return Contestant(layer, list(layer.parameters()), lambda: down.grad[0])


# -------------------------------------------------------------------------------------------- megatron-core
def without_cuda() -> None:
    """What megatron-core takes from CUDA and Transformer Engine, replaced for the CPU; none of its maths is.

    0.16.1 reads `te_general_gemm`, which it defines only where Transformer Engine is installed.
    """
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    torch.cuda.current_device = lambda: "cpu"  # where buffers lie
    stream = SimpleNamespace(
        synchronize=lambda: None, wait_stream=lambda _: None
    )  # copies are synchronous
    stream.record_event = lambda: stream
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    # On a GPU counts become arrays of the host here; gloo takes no tensors for them either.
    token_dispatcher.maybe_move_tensor_to_cpu = (
        lambda t, as_numpy=False, record_stream=False: (
            t.numpy() if as_numpy and isinstance(t, torch.Tensor) else t
        )
    )
    CudaRNGStatesTracker.fork = lambda self, name="": (
        contextlib.nullcontext()
    )  # there is no dropout


def mcore(shape: Shape, rank: int, ranks: int, kind: str) -> Contestant:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    without_cuda()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=shape.hidden,
        num_attention_heads=8,
        ffn_hidden_size=shape.ffn,
        moe_ffn_hidden_size=shape.ffn,
        num_moe_experts=shape.experts,
        moe_router_topk=shape.k,
        expert_model_parallel_size=ranks,
        moe_token_dispatcher_type=kind,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=shape.dtype,
        bf16=shape.dtype == torch.bfloat16,
    )
    spec = get_moe_module_spec(
        use_te=False, num_experts=shape.experts, moe_grouped_gemm=False
    )
    layer = MoELayer(config, spec.submodules)
    # The weights of this rank's experts.
    values = values_of(shape)
    layer.set_layer_number(1)
    experts = layer.experts.local_experts
    mine = range(rank * len(experts), (rank + 1) * len(experts))
    fill(
        [
            (layer.router.weight, values["router"]),
            *((m.linear_fc1.weight, values["up"][e]) for m, e in zip(experts, mine)),
            *((m.linear_fc2.weight, values["down"][e]) for m, e in zip(experts, mine)),
        ]
    )
    return Contestant(
        lambda x: layer(x)[0],
        list(layer.parameters()),
        lambda: experts[0].linear_fc2.weight.grad,
    )


# ------------------------------------------------------------------------------------------- a whole Mixtral
def tokens_of(shape: Shape) -> torch.Tensor:
    return torch.randint(
        shape.vocab,
        (shape.batch, shape.seq),
        generator=torch.Generator().manual_seed(2),
    )


def hf_model(shape: Shape, rank: int, ranks: int, kind: str) -> Contestant:
    from transformers import MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(hf_config(shape, kind)).to(shape.dtype).train()
    ids = tokens_of(shape)
    assert model.config._experts_implementation == kind, (
        "transformers has chosen another implementation"
    )
    target = ids.roll(-1, 1).flatten()

    def forward(x):
        logits = model(input_ids=ids).logits.flatten(0, 1)
        return F.cross_entropy(logits.float(), target)

    return Contestant(
        forward,
        list(model.parameters()),
        lambda: model.model.layers[0].mlp.experts.down_proj.grad[0],
    )


def model(shape: Shape, rank: int, ranks: int, kind: str) -> Contestant:
    from transformers import MixtralForCausalLM

    from megatron_ds.models import MODELS, build_stage, run_layers

    torch.manual_seed(0)
    theirs = MixtralForCausalLM(hf_config(shape, "eager"))
    config = our_config(shape)
    ctx = our_context(0, 1, shape.dtype)
    modules = build_stage(MODELS["gpt"](config, ctx))
    batch = our_batch(shape, tokens_of(shape))
    state = theirs.state_dict()
    fill(
        (p, mixtral_value(p.spec.name, state, config.num_attention_heads))
        for p in modules.parameters()
    )
    architecture = MODELS["gpt"]

    def forward(x):
        output = run_layers(modules, None, batch)
        return architecture.loss(
            output, batch, tp=ctx.tp, vocab_size=config.vocab_size, per_token=False
        ).objective

    name = "decoder.layers.0.mlp.experts.linear_fc2.weight"
    (down,) = (p for p in modules.parameters() if p.spec.name == name)
    return Contestant(forward, list(modules.parameters()), lambda: down.grad[0])


def mixtral_value(
    name: str, state: dict[str, torch.Tensor], heads: int
) -> torch.Tensor:
    """The value of our parameter `name` in the state of a MixtralForCausalLM."""
    outer = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
        "output_layer.weight": "lm_head.weight",
    }
    if name in outer:
        return state[outer[name]]
    _, _, layer, leaf = name.split(".", 3)
    at = f"model.layers.{layer}."
    if leaf == "self_attention.linear_qkv.weight":  # by head: query, key, value
        parts = [
            state[f"{at}self_attn.{x}_proj.weight"].unflatten(0, (heads, -1))
            for x in "qkv"
        ]
        return torch.stack(parts, 1).flatten(0, 2)
    inner = {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.router.weight": "mlp.gate.weight",
        "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
        "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
    }
    return state[at + inner[leaf]]


CONTESTANTS = {
    "ours": ours,
    "dense": dense,
    "hf": hf,
    "mcore": mcore,
    "model": model,
    "hf-model": hf_model,
}


# ---------------------------------------------------------------------------------------------- measurement
def check(name: str, found: tuple, wanted: tuple) -> str:
    """Raises AssertionError where results differ by more than rounding, relative to the largest value; in bf16 where
    most of them differ."""
    is_low = found[1].dtype == torch.bfloat16
    size = torch.Tensor.norm if is_low else lambda t: t.abs().max()
    errors = [
        (size(a.float() - b.float()) / size(b.float())).item()
        for a, b in zip(found, wanted)
        if a is not None and b is not None
    ]
    limit = TOLERANCE_OF_MOST if is_low else TOLERANCE
    assert max(errors) < limit, f"{name} differs from the first contestant: {errors}"
    return f"{max(errors):.1e}"


def run_rank(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(args.threads)
    if args.allocator == "ours":
        from megatron_ds.host.allocator import set_allocator

        assert set_allocator(keep_freed=True).is_ours
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks
    )
    # The contestants of this rank, and rows and gradients for them.
    shape = replace(SHAPES[args.shape], dtype=DTYPES[args.dtype])
    made = {
        name: CONTESTANTS[name.partition(":")[0]](
            shape, rank, args.ranks, name.partition(":")[2]
        )
        for name in args.contestants
    }
    draw = torch.Generator().manual_seed(10 + rank)
    x, dy = (
        torch.randn(shape.seq, shape.batch, shape.hidden, generator=draw).to(
            shape.dtype
        )
        for _ in range(2)
    )
    # Results are those of the first contestant.
    differences = {}
    first = None
    for name, contestant in made.items():
        y, dx = contestant.step(x, dy)
        gradient = (
            contestant.first_expert() if contestant.first_expert and rank == 0 else None
        )
        first = first or (y, dx, gradient)
        differences[name] = (
            "" if name == "dense" else check(name, (y, dx, gradient), first)
        )
    # The steps, in turns.
    times = {name: [] for name in made}
    for _ in range(args.steps):
        for name, contestant in made.items():
            times[name].append(measured(contestant, x, dy))
    if rank == 0:
        report(args, times, differences)
    if args.profile and rank == 0 and args.ranks == 1:
        profile(made[args.contestants[0]], x, dy)
    dist.destroy_process_group()


def measured(
    contestant: Contestant, x: torch.Tensor, dy: torch.Tensor
) -> tuple[float, float]:
    """(milliseconds of the step, milliseconds of processor time of all ranks)."""
    dist.barrier()
    start = time.perf_counter()
    busy = time.process_time()
    contestant.step(x, dy)
    own = torch.tensor(time.process_time() - busy, dtype=torch.float64)
    dist.all_reduce(own)
    return 1e3 * (time.perf_counter() - start), 1e3 * own.item()


def report(
    args: argparse.Namespace,
    times: dict[str, list[tuple[float, float]]],
    differences: dict[str, str],
) -> None:
    first = next(iter(times))
    print(
        f"{args.shape}, {args.dtype}: {SHAPES[args.shape]}\ntorch {torch.__version__}, {args.ranks} rank(s) of "
        f"{args.threads} thread(s), {args.steps} steps, allocator: {args.allocator}, "
        f"load of the machine {os.getloadavg()[0]:.1f}"
    )
    print(
        f"| | ms, median (quartiles) | {first}, times as fast | processor ms | {first}, times as fast "
        "| largest relative difference |\n|---|---|---|---|---|---|"
    )
    for name, values in times.items():
        columns = []
        for own, base in zip(zip(*values), zip(*times[first])):
            columns += [spread(own, 1), spread([b / a for a, b in zip(base, own)], 2)]
        print(f"| {name} | {' | '.join(columns)} | {differences[name]} |")


def spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def profile(contestant: Contestant, x: torch.Tensor, dy: torch.Tensor) -> None:
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(10):
            contestant.step(x, dy)
    print(
        recorded.key_averages().table(
            sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--contestants",
        nargs="+",
        default=["ours", "dense", "hf:grouped_mm", "hf:eager"],
    )
    parser.add_argument("--shape", choices=SHAPES, default="S")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of each rank; default: 2 together")
    parser.add_argument(
        "--steps", type=int, default=30, help="measured steps of each contestant"
    )
    parser.add_argument(
        "--allocator",
        choices=("default", "ours"),
        default="default",
        help="ours: all contestants use the settings of glibc that our training has",
    )
    parser.add_argument(
        "--profile", action="store_true", help="print a profile of the first contestant"
    )
    args = parser.parse_args()
    args.threads = args.threads or max(1, 2 // args.ranks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            run_rank, (args, f"{folder}/store"), nprocs=args.ranks
        )


if __name__ == "__main__":
    main()
