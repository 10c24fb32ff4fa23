"""A tiny language model cut into stages, and the same model trained by plain torch in one piece.

Legend: b samples, s positions, h hidden, v vocabulary; hidden states [s, b, h].
"""

import queue
from collections import defaultdict, deque
from types import SimpleNamespace

import torch
from torch import nn

from megatron_ds.batch.batch import Batch
from megatron_ds.mpu.channels import Channels
from megatron_ds.pipeline.executor import Executor
from megatron_ds.pipeline.instruction import Instruction, Op
from megatron_ds.pipeline.passes import lower
from megatron_ds.pipeline.stage import Stage
from tests.harness.limits import HUNG
from tests.harness.threads import run_ranks

VOCABULARY, HIDDEN, SEQUENCE = 11, 6, 5
SCALE = 0.37


class Embedding(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.weight = nn.Parameter(draw(VOCABULARY, HIDDEN))

    def forward(self, x, batch):
        return self.weight[batch.tokens.t()]  # [s, b, h]


class Block(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(draw(HIDDEN, HIDDEN)),
            nn.Parameter(draw(HIDDEN)),
        )

    def forward(self, x, batch):
        return x + torch.tanh(x @ self.weight + self.bias)


class Head(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.weight = nn.Parameter(draw(VOCABULARY, HIDDEN))

    def forward(self, x, batch):
        return x @ self.weight.t()  # [s, b, v]


def token_loss(logits, batch):
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.t().flatten(), reduction="none"
    )
    losses = losses * batch.loss_mask.t().flatten()
    return SimpleNamespace(
        objective=losses.sum() / batch.loss_mask.sum(),
        total=losses.sum().detach(),
        tokens=batch.loss_mask.sum(),
    )


def make_layers(num_blocks: int, seed: int = 3) -> list[nn.Module]:
    """Embedding, blocks and head, always with the same weights."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator) * 0.3
    return [Embedding(draw), *(Block(draw) for _ in range(num_blocks)), Head(draw)]


def make_batches(
    num_microbatches: int, seed: int = 5, length: int = SEQUENCE
) -> tuple[Batch, ...]:
    """Micro-batches of 2 samples, the last of 1."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * num_microbatches - 1
    tokens = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    mask = torch.ones(rows, length)
    mask[::2, 1] = 0
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        mask,
        torch.arange(length).expand(rows, -1),
        tuple(range(rows)),
    )
    return batch.split(2)


def train_in_one_piece(layers, microbatches, scale) -> list[torch.Tensor]:
    """Plain torch: the objectives; gradients are left in the layers' parameters."""
    objectives = []
    for batch in microbatches:
        x = None
        for layer in layers:
            x = layer(x, batch)
        objective = token_loss(x, batch).objective
        (objective * scale).backward()
        objectives.append(objective.detach())
    return objectives


def make_stage(layers, bounds, index: int, stage_class=Stage) -> Stage:
    last = index == len(bounds) - 2
    return stage_class(
        index,
        layers[bounds[index] : bounds[index + 1]],
        is_first=index == 0,
        is_last=last,
        loss=token_loss if last else None,
    )


def make_executor(
    program, layers, bounds, channels, stage_rank, rank, hooks=None, stage_class=Stage
) -> Executor:
    """The executor of one rank; the layers may be the whole model, only the slices of its stages are used."""
    stages = {
        s: make_stage(layers, bounds, s, stage_class)
        for s in range(len(bounds) - 1)
        if stage_rank(s) == rank
    }
    return Executor(
        program,
        stages,
        channels,
        stage_rank,
        lambda batch: (batch.seq_length, batch.size, HIDDEN),
        torch.float32,
        torch.device("cpu"),
        hooks,
    )


def pipeline_group(world, rank):
    return world.group("pp", tuple(range(world.size)), rank)


def run_pipeline(schedule, bounds, microbatches, stage_rank, make_channels=None):
    """One step on threads: each rank's losses, and for each layer the gradients from the rank that holds
    it."""
    num_blocks, num_stages = bounds[-1] - 2, len(bounds) - 1
    lowered = lower(schedule, num_stages)

    def main(rank, world):
        layers = make_layers(num_blocks)
        channels = (
            make_channels(rank, world)
            if make_channels
            else Channels(pipeline_group(world, rank))
        )
        reduced = []
        executor = make_executor(
            lowered[rank],
            layers,
            bounds,
            channels,
            stage_rank,
            rank,
            {Op.REDUCE: reduced.append},
        )
        losses = executor.run(microbatches, SCALE)
        assert sorted(reduced) == sorted(executor.stages)
        mine = {at for s in executor.stages for at in range(bounds[s], bounds[s + 1])}
        return losses, {at: [p.grad for p in layers[at].parameters()] for at in mine}

    results = run_ranks(len(schedule), main)
    return [losses for losses, _ in results], {
        at: grads for _, held in results for at, grads in held.items()
    }


def assert_equals_one_process(losses, gradients, microbatches, num_blocks):
    layers = make_layers(num_blocks)
    objectives = train_in_one_piece(layers, microbatches, SCALE)
    assert all(
        torch.equal(ours.objective, theirs)
        for ours, theirs in zip(losses, objectives, strict=True)
    )
    assert sorted(gradients) == list(range(len(layers)))
    for at, layer in enumerate(layers):
        assert all(
            torch.equal(ours, p.grad)
            for ours, p in zip(gradients[at], layer.parameters(), strict=True)
        ), at


def split_backwards(schedule, delay: int = 0):
    """Each B of a schedule as I and W, the W `delay` backwards of its stage later, or at the end."""
    return tuple(_split_program(program, delay) for program in schedule)


def _split_program(program, delay):
    split, late = [], defaultdict(deque)
    for i in program:
        if i.op is not Op.B:
            split.append(i)
            continue
        split.append(Instruction(Op.I, i.stage, i.microbatch))
        late[i.stage].append(Instruction(Op.W, i.stage, i.microbatch))
        if len(late[i.stage]) > delay:
            split.append(late[i.stage].popleft())
    return (*split, *(w for stage in late for w in late[stage]))


class PostOffice:
    """Mail among threads; see `RendezvousChannels`. `setdefault` is atomic, and a defaultdict of queues is
    not."""

    def __init__(self):
        self._boxes = {}

    def box(self, *key) -> queue.Queue:
        return self._boxes.setdefault(key, queue.Queue())


class RendezvousChannels:
    """The strictest legal transport: a send blocks until the peer has posted its receive."""

    def __init__(self, office: PostOffice, rank: int, world, timeout: float = HUNG):
        self.office, self.rank, self.baton, self.timeout = (
            office,
            rank,
            world.baton,
            timeout,
        )

    def announce(self, shapes, dtype):
        pass

    def send(self, kind, destination, tensor):
        self.baton.take(
            self.office.box("posted", self.rank, destination, kind), self.timeout
        )
        self.office.box("mail", self.rank, destination, kind).put(tensor.clone())

    def recv(self, kind, source, shape, dtype, device):
        self.office.box("posted", source, self.rank, kind).put(None)
        return SimpleNamespace(wait=lambda: self._take(kind, source, shape))

    def drain(self):
        pass

    def _take(self, kind, source, shape):
        tensor = self.baton.take(
            self.office.box("mail", source, self.rank, kind), self.timeout
        )
        assert tuple(tensor.shape) == tuple(shape), (
            f"expected {shape}, received {tuple(tensor.shape)}"
        )
        return tensor
