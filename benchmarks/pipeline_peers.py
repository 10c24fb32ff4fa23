"""Pipeline-parallel contestants on two gloo processes: torch.distributed.pipelining and DeepSpeed's
PipelineModule.

    torchpp:SCHEDULE[/CUT]    gpipe, 1f1b, interleaved, interleaved-zb, zbv; CUT is blocks per stage, as
                              in torchpp:1f1b/4+2
    dspp[:METHOD]             DeepSpeed's 1F1B, cut by METHOD: parameters (default) or uniform

The embedding and the head share one matrix. torch has no means for that: each of the two stages holds a copy
here, their gradients are summed after the schedule, and the gradient norm counts them once. DeepSpeed has
TiedLayerSpec; its norm counts the copies twice, so that its loss is another one as soon as clipping sets in.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants import PlainGPT, Step, plain_adamw
from torch import nn
from workloads import CLIP, NUM_BATCHES, Workload, token_batches

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
# rank → its stages
PLACES = {
    "interleaved": ((0, 2), (1, 3)),
    "interleaved-zb": ((0, 2), (1, 3)),
    "zbv": ((0, 3), (1, 2)),
}


class Part(nn.Module):
    """Blocks [start, stop) of the plain model, with the embedding before the first and the head behind the
    last one.
    """

    def __init__(self, whole: PlainGPT, start: int, stop: int):
        super().__init__()
        self.blocks = nn.ModuleList(whole.blocks[start:stop])
        self.is_first = start == 0
        self.is_last = stop == len(whole.blocks)
        if self.is_first:
            self.wte = whole.wte
            self.wpe = whole.wpe
        # The head starts as a copy of the embedding.
        if self.is_last:
            self.lnf = whole.lnf
            matrix = whole.wte.weight.detach().clone()
            vocabulary, width = matrix.shape
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = nn.Parameter(matrix)

    def forward(self, x):
        """Tokens [b, s] or hidden states [b, s, h] → hidden states, or logits of the last part."""
        if self.is_first:
            x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.is_last:
            x = self.head(self.lnf(x))
        return x


def torchpp(w: Workload, rank: int, dtype: str, schedule: str, cut: str) -> Step:
    """A step of torch.distributed.pipelining. cut: blocks per stage; "" divides them evenly."""
    from torch.distributed.pipelining import PipelineStage, schedules

    # The stages of this rank, and the blocks of each.
    mine = PLACES.get(schedule, ((0,), (1,)))[rank]
    num_stages = 2 * len(mine)
    counts = _even(w.layers, num_stages)
    if cut:
        counts = [int(n) for n in cut.split("+")]
    if len(counts) != num_stages or sum(counts) != w.layers:
        example = "+".join(map(str, _even(w.layers, num_stages)))
        raise SystemExit(
            f"torchpp:{schedule}/{cut}: {schedule} has {num_stages} stages here "
            f"and the model {w.layers} blocks. "
            f"Name {num_stages} numbers with that sum, as in {example}."
        )
    # The parts of this rank, and the shapes of what they exchange.
    bounds = [sum(counts[:s]) for s in range(num_stages + 1)]
    weights = torch.bfloat16 if dtype == "bf16" else torch.float32
    whole = PlainGPT(w).to(weights)
    m = w.micro_batch
    parts = [Part(whole, bounds[s], bounds[s + 1]) for s in mine]
    hidden = torch.zeros(m, w.seq, w.hidden, dtype=weights, requires_grad=True)
    tokens = torch.zeros(m, w.seq, dtype=torch.long)
    logits = torch.zeros(m, w.seq, w.vocab, dtype=weights, requires_grad=True)
    stages = []
    for s, part in zip(mine, parts):
        stage = PipelineStage(
            part,
            s,
            num_stages,
            torch.device("cpu"),
            input_args=(tokens if part.is_first else hidden,),
            output_args=(logits if part.is_last else hidden,),
        )
        stages.append(stage)
    # The schedule, with the loss of a micro-batch.
    num_microbatches = w.global_batch // m
    make = getattr(schedules, SCHEDULES[schedule])
    several = schedule in PLACES
    run = make(
        stages if several else stages[0],
        num_microbatches,
        loss_fn=_mean_loss,
    )
    # The copies of the tied matrix, which the gradient norm counts once.
    everything = nn.ModuleList(parts)
    optimizer = plain_adamw(everything)
    data = torch.from_numpy(token_batches(w))
    first = next((part.wte.weight for part in parts if part.is_first), None)
    last = next((part.head.weight for part in parts if part.is_last), None)
    counted = [p for p in everything.parameters() if p is not last]

    def step(i: int) -> float:
        rows = data[i % NUM_BATCHES]
        losses = []
        inputs = []
        named = {}
        if first is not None:
            tokens = rows[:, :-1].contiguous()
            inputs.append(tokens)
        if last is not None:
            named["target"] = rows[:, 1:].contiguous()
            named["losses"] = losses
        run.step(*inputs, **named)
        # Clipping needs the sum of the tied gradients.
        _sum_tied(first, last)
        _clip(counted, everything)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # The first rank gets the loss from the last.
        total = torch.zeros(())
        if losses:
            total = torch.stack(losses).mean().float()
        dist.all_reduce(total)
        return total.item()

    return step


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy in fp32 of logits [b, s, vocabulary] and labels [b, s]."""
    logits = logits.float().flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten())


def _even(layers: int, stages: int) -> list[int]:
    """Blocks of each stage. The last stages, which have the head or stand beside it, get fewer."""
    return [layers // stages + (s < layers % stages) for s in range(stages)]


def _sum_tied(first: torch.Tensor | None, last: torch.Tensor | None) -> None:
    """Give both copies of the tied matrix the sum of their gradients."""
    # Both may be on one rank.
    if first is not None and last is not None:
        first.grad += last.grad
        last.grad.copy_(first.grad)
    elif first is not None or last is not None:
        dist.all_reduce((last if first is None else first).grad)


def _clip(counted: list[torch.Tensor], everything: nn.Module) -> None:
    """Clip the gradients by the norm over all ranks. counted: parameters that the norm counts here."""
    norms = torch._foreach_norm([p.grad for p in counted])
    # Each rank has a part of the parameters.
    square = torch.stack(norms).square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    factor = CLIP / (norm + 1e-6)
    factor = factor.clamp(max=1.0)
    torch._foreach_mul_([p.grad for p in everything.parameters()], factor)


class _Embed(nn.Module):
    """The embedding of DeepSpeed's first stage, whose matrix is also that of the head."""

    def __init__(self, wte: nn.Embedding, wpe: nn.Embedding):
        super().__init__()
        self.wte = wte
        self.wpe = wpe

    def forward(self, tokens):
        """Tokens [b, s] → the sum of their embeddings and those of their positions [b, s, h]."""
        return self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]


def dspp(w: Workload, dtype: str, method: str) -> Step:
    """A step of DeepSpeed's PipelineModule. method: how it cuts the layers."""
    import deepspeed
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # it sets its own
    # The layers, of which the first and the last share their weight.
    whole = PlainGPT(w)
    tied = lambda **way: TiedLayerSpec(
        "embed", _Embed, whole.wte, whole.wpe, tied_weight_attr=["wte.weight"], **way
    )
    head = lambda module, x: F.linear(x, module.wte.weight)
    layers = [tied(), *whole.blocks, whole.lnf, tied(forward_fn=head)]
    net = PipelineModule(
        layers=layers,
        num_stages=2,
        loss_fn=_mean_loss,
        activation_checkpoint_interval=0,
        partition_method=method,
    )
    # The engine, with the same optimizer as the others.
    config = {
        "train_micro_batch_size_per_gpu": w.micro_batch,
        "gradient_accumulation_steps": w.global_batch // w.micro_batch,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 0},
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
        net = net.to(torch.bfloat16)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=plain_adamw(net),
        config=config,
    )
    data = torch.from_numpy(token_batches(w))

    def step(i: int) -> float:
        # Inputs and labels of each micro-batch.
        pairs = []
        for rows in data[i % NUM_BATCHES].split(w.micro_batch):
            inputs = rows[:, :-1].contiguous()
            labels = rows[:, 1:].contiguous()
            pairs.append((inputs, labels))
        return float(engine.train_batch(data_iter=iter(pairs)))

    return step
