"""Tensor-parallel contestants on two gloo processes: torch's DTensor, and megatron-core where it is
installed.

    pip install megatron-core==0.16.1          # only for the contestant `mcore`

Both get fused AdamW, a vocabulary-parallel loss and the gradient norm of the whole model, as our step has.
Two things that megatron-core takes from CUDA are replaced for CPU (`_without_cuda`); nothing of its maths is.
"""

import contextlib
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants import SHORT_NAMES, Step, logical_value
from torch import nn
from workloads import (
    BETAS,
    CLIP,
    EPS,
    LEARNING_RATE,
    NUM_BATCHES,
    WEIGHT_DECAY,
    Workload,
    initial_weights,
    token_batches,
)


def adamw(parameters) -> torch.optim.Optimizer:
    """Fused AdamW; split and whole tensors go to separate groups, which DTensor needs."""
    key = lambda p: (p.dim() >= 2, type(p.data) is torch.Tensor)
    groups = [
        dict(
            params=[p for p in parameters if key(p) == k],
            weight_decay=WEIGHT_DECAY if k[0] else 0.0,
        )
        for k in {key(p) for p in parameters}
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)


def clip_(gradients: list[tuple[torch.Tensor, bool]]) -> None:
    """Clip local gradients [(tensor, is split over the ranks)] by the norm of the whole model."""
    square = {True: torch.zeros(()), False: torch.zeros(())}
    for gradient, is_split in gradients:
        square[is_split] += gradient.square().sum()
    dist.all_reduce(square[True])
    norm = (square[True] + square[False]).sqrt().item()
    torch._foreach_mul_([g for g, _ in gradients], min(1.0, CLIP / (norm + 1e-6)))


# ---------------------------------------------------------------------------------------------------- DTensor
class Block(nn.Module):
    def __init__(self, h: int, heads: int, tp: int):
        super().__init__()
        self.heads = heads // tp
        self.head_dim = h // heads
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = (
            nn.Linear(h, 3 * h),
            nn.Linear(h, h),
        )  # rows of qkv: per head q, k, v
        self.fc1, self.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        b, s, _ = x.shape
        q, k, v = (
            self.qkv(self.ln1(x))
            .view(b, s, self.heads, 3, self.head_dim)
            .permute(3, 0, 2, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, w: Workload, tp: int):
        super().__init__()
        self.wte, self.wpe = (
            nn.Embedding(w.vocab, w.hidden),
            nn.Embedding(w.seq, w.hidden),
        )
        self.blocks = nn.ModuleList(
            Block(w.hidden, w.heads, tp) for _ in range(w.layers)
        )
        self.lnf, self.head = (
            nn.LayerNorm(w.hidden),
            nn.Linear(w.hidden, w.vocab, bias=False),
        )

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.lnf(x))


def _our_name(name: str) -> str:
    """Name of a parameter of the DTensor model → ours, whose logical values are known."""
    long = {short: name for name, short in SHORT_NAMES.items()}
    if name.startswith(("wte", "head")):
        return "embedding.word_embeddings.weight"
    if name.startswith("wpe"):
        return "embedding.position_embeddings.weight"
    if name.startswith("lnf"):
        return name.replace("lnf", "decoder.final_layernorm")
    _, layer, module, leaf = name.split(".")
    return f"decoder.layers.{layer}.{long[module]}.{leaf}"


def dtensor(w: Workload, rank: int, world: int, dtype: str) -> Step:
    """bf16: autocast over fp32 weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    model = GPT(w, world)
    values = initial_weights(w)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(logical_value(_our_name(name), values, w)))
    # Column and row parallelism, and logits divided by vocabulary.
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "qkv": ColwiseParallel(),
                "proj": RowwiseParallel(),
                "fc1": ColwiseParallel(),
                "fc2": RowwiseParallel(),
            },
        )
    parallelize_module(
        model,
        mesh,
        {
            "wte": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(use_local_output=False),
        },
    )
    model.head.weight = model.wte.weight
    # The optimizer, with the tied matrix once.
    parameters = list(dict.fromkeys(model.parameters()))
    optimizer = adamw(parameters)
    data = torch.from_numpy(token_batches(w))
    local = lambda t: t.to_local() if isinstance(t, DTensor) else t
    is_split = lambda p: (
        isinstance(p, DTensor) and any(place.is_shard() for place in p.placements)
    )

    def step(i: int) -> float:
        total = 0.0
        rows = data[i % NUM_BATCHES].split(w.micro_batch)
        for part in rows:
            with loss_parallel():
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                    logits = model(part[:, :-1]).flatten(0, 1)
                loss = F.cross_entropy(logits.float(), part[:, 1:].reshape(-1)) / len(
                    rows
                )
                loss.backward()
            total += (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
        clip_([(local(p.grad), is_split(p)) for p in parameters])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


# ----------------------------------------------------------------------------------------------------
# megatron-core
def _without_cuda() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: "cpu"  # where a scratch buffer lies
    CudaRNGStatesTracker.fork = lambda self, name="": (
        contextlib.nullcontext()
    )  # there is no dropout


def mcore(w: Workload, rank: int, world: int, dtype: str) -> Step:
    """bf16: weights and gradients of 16 bits, fp32 masters."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    # The model of megatron-core, without kernels that need a GPU.
    _without_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    config = TransformerConfig(
        num_layers=w.layers,
        hidden_size=w.hidden,
        num_attention_heads=w.heads,
        ffn_hidden_size=4 * w.hidden,
        use_cpu_initialization=True,
        perform_initialization=False,
        tensor_model_parallel_size=world,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_epsilon=1e-5,
        activation_func=partial(F.gelu, approximate="tanh"),
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=dtype == "bf16",
        params_dtype=torch.float32,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=w.vocab,
        max_sequence_length=w.seq,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )
    # The weights of the workload, and their masters.
    parameters, split = _load_mcore(model, w, rank, world)
    masters = (
        parameters
        if dtype == "fp32"
        else [nn.Parameter(p.detach().clone()) for p in parameters]
    )
    if dtype == "bf16":
        model.bfloat16()
    optimizer = adamw(masters)
    data = torch.from_numpy(token_batches(w))
    positions = torch.arange(w.seq).unsqueeze(0).expand(w.micro_batch, -1)
    mask = torch.triu(torch.ones(w.seq, w.seq, dtype=torch.bool), 1)[None, None]

    def step(i: int) -> float:
        # Gradients are summed over the micro-batches.
        total = 0.0
        rows = data[i % NUM_BATCHES].split(w.micro_batch)
        for part in rows:
            loss = model(
                part[:, :-1].contiguous(),
                positions,
                mask,
                labels=part[:, 1:].contiguous(),
            ).mean() / len(rows)
            loss.backward()
            total += loss.item()
        # The update of the masters, and the copy to the weights.
        for p, master in zip(parameters, masters):
            master.grad = p.grad.float()  # itself in fp32
        clip_([(master.grad, s) for master, s in zip(masters, split)])
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        for p in (*parameters, *masters):
            p.grad = None
        return total

    return step


def _load_mcore(
    model: nn.Module, w: Workload, rank: int, world: int
) -> tuple[list[nn.Parameter], list[bool]]:
    """Fill the weights; (parameters, which of them are split). Its names are ours: both are Megatron's."""
    values = initial_weights(w)
    rows = ("word_embeddings", "linear_qkv", "linear_fc1")
    columns = ("proj.weight", "fc2.weight")
    parameters = []
    split = []
    for name, parameter in model.named_parameters():
        whole = logical_value(name, values, w)
        dim = None
        if any(r in name for r in rows):
            dim = 0
        elif name.endswith(columns):
            dim = 1
        mine = whole if dim is None else np.split(whole, world, dim)[rank]
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(mine)))
        parameters.append(parameter)
        split.append(dim is not None)
    return parameters, split
