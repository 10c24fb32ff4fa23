"""One training step of each contestant on a workload: a function from the step's number to the step's loss.

`ours` runs this package's replica; `eager` is plain PyTorch in one process, `compile` the same under
torch.compile, `ddp` and `ddp-compile` under DistributedDataParallel, all with fused AdamW, foreach clipping
and SDPA attention. In bf16 they are under autocast; with the suffix `+mixed` they have bf16 weights and
gradients, and fp32 masters.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_llama import PlainLlama
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

Step = Callable[[int], float]


# ---------------------------------------------------------------------------------------------------- plain
# PyTorch
class PlainBlock(nn.Module):
    def __init__(self, h: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc1, self.fc2 = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (
            self.qkv(self.ln1(x))
            .view(b, s, 3, self.heads, h // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # [b, n, s, d]
        x = x + self.proj(attended.transpose(1, 2).reshape(b, s, h))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """The reference model; its parameter names are the short names of `initial_weights`."""

    def __init__(self, w: Workload):
        super().__init__()
        self.wte, self.wpe = (
            nn.Embedding(w.vocab, w.hidden),
            nn.Embedding(w.seq, w.hidden),
        )
        self.blocks = nn.ModuleList(
            PlainBlock(w.hidden, w.heads) for _ in range(w.layers)
        )
        self.lnf = nn.LayerNorm(w.hidden)
        fill(self, w)

    def forward(self, tokens, labels):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def fill(model: nn.Module, w: Workload) -> None:
    """Copies the initial weights of a workload to a plain model."""
    values = initial_weights(w)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = name.removeprefix("blocks.")
            key = (
                key[:3]
                if key[:3] in ("wte", "wpe")
                else key.replace("weight", "w").replace("bias", "b")
            )
            parameter.copy_(torch.from_numpy(values[key]))


def plain_model(w: Workload) -> nn.Module:
    """The plain model of a workload with its initial weights."""
    if not w.ffn:
        return PlainGPT(w)
    model = PlainLlama(w)
    fill(model, w)
    return model


def adamw_groups(model: nn.Module) -> list[dict]:
    return [
        dict(
            params=[p for p in model.parameters() if p.dim() >= 2],
            weight_decay=WEIGHT_DECAY,
        ),
        dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0),
    ]


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        adamw_groups(model), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True
    )


class MasterAdamW:
    """AdamW on fp32 masters of a bf16 model, which the caller converted after this object was made."""

    def __init__(self, model: nn.Module):
        self.low = list(model.parameters())
        self.masters = {p: p.detach().clone() for p in self.low}
        groups = adamw_groups(model)
        for group in groups:
            group["params"] = [self.masters[p] for p in group["params"]]
        self.adamw = torch.optim.AdamW(
            groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True
        )

    def clip_and_step(self) -> None:
        masters = list(self.masters.values())
        for p, master in self.masters.items():
            master.grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        self.adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self.low, masters)

    def zero_grad(self, set_to_none: bool) -> None:
        for p, master in self.masters.items():
            master.grad = None
            if set_to_none:
                p.grad = None
            else:
                p.grad.zero_()


def plain(
    w: Workload,
    rank: int,
    world: int,
    dtype: str,
    compiled: bool = False,
    mixed: bool = False,
) -> Step:
    """Under DistributedDataParallel when there are several ranks. mixed: bf16 weights with fp32 masters."""
    net = model = plain_model(w)
    optimizer = MasterAdamW(model) if mixed else plain_adamw(model)
    if mixed:
        model.to(torch.bfloat16)
    if world > 1:
        net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if compiled:
        net = torch.compile(net)
    return plain_step(w, rank, world, net, optimizer, "fp32" if mixed else dtype)


def plain_step(
    w: Workload,
    rank: int,
    world: int,
    net: nn.Module,
    optimizer: torch.optim.Optimizer | MasterAdamW,
    dtype: str,
    microbatch: Callable[[bool], AbstractContextManager] | None = None,
    keep_gradients: bool | None = None,
) -> Step:
    """PyTorch's training loop. bf16 is autocast over fp32 weights.

    microbatch      context of the forward and backward of a micro-batch, given whether it is the last;
                    default DDP's no_sync
    keep_gradients  between the steps, zeroed; default where they are views of DDP's buckets
    """
    data = torch.from_numpy(token_batches(w))
    share = w.global_batch // world
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")
    if microbatch is None:
        microbatch = lambda is_last: (
            nullcontext() if is_last or world == 1 else net.no_sync()
        )

    def step(i: int) -> float:
        total = torch.zeros(())
        mine = data[i % NUM_BATCHES][rank * share : (rank + 1) * share].split(
            w.micro_batch
        )
        for j, rows in enumerate(mine):
            with microbatch(j == len(mine) - 1):
                with autocast():
                    loss = net(rows[:, :-1], rows[:, 1:]) / len(mine)
                loss.backward()
            total += loss.detach() / world
        if isinstance(optimizer, MasterAdamW):
            optimizer.clip_and_step()
        else:
            torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
        optimizer.zero_grad(
            set_to_none=not (world > 1 if keep_gradients is None else keep_gradients)
        )
        if world > 1:
            dist.all_reduce(total)
        return total.item()

    return step


# ---------------------------------------------------------------------------------------------------- this
# package
def our_flags(w: Workload, dtype: str, layout: tuple[str, ...]) -> list[str]:
    return [
        "--num-layers",
        str(w.layers),
        "--hidden-size",
        str(w.hidden),
        "--num-attention-heads",
        str(w.heads),
        "--seq-length",
        str(w.seq),
        "--max-position-embeddings",
        str(w.seq),
        "--vocab-size",
        str(w.vocab),
        "--hidden-dropout",
        "0",
        "--attention-dropout",
        "0",
        "--micro-batch-size",
        str(w.micro_batch),
        "--global-batch-size",
        str(w.global_batch),
        "--train-iters",
        "1000",
        "--lr",
        str(LEARNING_RATE),
        "--lr-decay-style",
        "constant",
        "--weight-decay",
        str(WEIGHT_DECAY),
        "--adam-beta1",
        str(BETAS[0]),
        "--adam-beta2",
        str(BETAS[1]),
        "--adam-eps",
        str(EPS),
        "--clip-grad",
        str(CLIP),
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
        *(["--bf16"] if dtype == "bf16" else []),
        *(["--position-embedding-type", "rope"] if w.rotary or w.ffn else []),
        *(llama_flags(w) if w.ffn else []),
        *layout,
    ]


def llama_flags(w: Workload) -> list[str]:
    experts = ["--num-experts", str(w.experts), "--moe-router-topk", str(w.k)]
    return [
        *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
        *("--group-query-attention", "--num-query-groups", str(w.groups)),
        *("--ffn-hidden-size", str(w.ffn)),
        *(experts if w.experts else []),
    ]


def ours(
    w: Workload, world: int, dtype: str, layout: tuple[str, ...], stack: ExitStack
) -> Step:
    """`stack` leaves the other ranks when it closes."""
    from megatron_ds.config import parse
    from megatron_ds.data.loading.loader import Loader
    from megatron_ds.data.samples.gpt_data import GPTCollator
    from megatron_ds.mpu import launch as launching
    from megatron_ds.progress.ramps import Progress
    from megatron_ds.training.build import build_replica
    from megatron_ds.training.distributed import joined
    from megatron_ds.training.step import train_step

    config = parse(our_flags(w, dtype, layout), world_size=world)
    replica = build_replica(
        config, stack.enter_context(joined(config, launching.read_launch(os.environ)))
    )
    _load(replica, initial_weights(w), w)
    loader = Loader(Samples(w), GPTCollator(w.seq), micro_batch_size=w.micro_batch)

    def step(i: int) -> float:
        progress = Progress(step=i, samples=i * w.global_batch)
        batch = replica.batches.training(loader, progress, w.global_batch)
        return train_step(
            replica,
            batch,
            progress,
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
        ).loss

    return step


class Samples:
    """The batches as a dataset of our loader: sample i is row i of all batches laid end to end, over and
    over.
    """

    def __init__(self, w: Workload):
        self.rows = token_batches(w).reshape(-1, w.seq + 1)

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"tokens": self.rows[i % len(self.rows)]}


SHORT_NAMES = {
    "input_layernorm": "ln1",
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "proj",
    "pre_mlp_layernorm": "ln2",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
    "mlp.router": "router",
    "mlp.experts.linear_fc1": "fc1",
    "mlp.experts.linear_fc2": "fc2",
}


def logical_value(name: str, values: dict[str, np.ndarray], w: Workload) -> np.ndarray:
    """The initial value of our parameter `name`, as a logical tensor."""
    if name.startswith("embedding."):
        return values["wte" if "word" in name else "wpe"]
    if name.startswith("decoder.final_layernorm"):
        return values["lnf." + name.rsplit(".", 1)[1][0]]
    _, _, layer, rest = name.split(".", 3)
    module, leaf = rest.rsplit(".", 1)
    value = values[f"{layer}.{SHORT_NAMES[module]}.{leaf[0]}"]
    if SHORT_NAMES[module] == "qkv":
        value = packed_heads(value, w)
    return np.ascontiguousarray(value)


def packed_heads(value: np.ndarray, w: Workload) -> np.ndarray:
    """Rows of all queries, keys and values → by group its queries, its key, its value."""
    groups = w.groups or w.heads
    d = w.hidden // w.heads
    rows = value.reshape(w.heads + 2 * groups, d, -1)
    queries, keys, values = np.split(rows, (w.heads, w.heads + groups))
    queries = queries.reshape(groups, w.heads // groups, d, -1)
    parts = (queries, keys[:, None], values[:, None])
    return np.concatenate(parts, axis=1).reshape(value.shape)


def _load(replica, values: dict[str, np.ndarray], w: Workload) -> None:
    from megatron_ds.checkpoint.pieces import views

    for piece in replica.optimizer.pieces():
        if piece.kind == "weight":
            whole = torch.from_numpy(logical_value(piece.spec.name, values, w))
            for view in views(piece, replica.mesh.coordinates):
                where = tuple(
                    slice(o, o + n) for o, n in zip(view.offset, view.tensor.shape)
                )
                view.tensor.copy_(whole[where])
    replica.optimizer.after_load()
