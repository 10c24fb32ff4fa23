"""`Scorer`: log-probabilities of given tokens, by a model under any layout.

The forward is that of training and evaluation: the same program of the pipeline, the same layers, with a
loss that returns two numbers per token. These, never logits, are what the ranks exchange.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...batch.batch import Batch
from ...data.samples.gpt_data import GPT_DATA
from ...errors import ConfigError
from ...host import places
from ...models import MODELS
from ...mpu.collectives import all_reduce_
from ...mpu.host_reads import to_host
from ...training.build import Replica
from .score_plan import Portion, ScoreRequest, plan_portions
from .token_scores import TokenScores, token_scores

ROUND = 4  # micro-batches of a forward, for each stage of a pipeline


@dataclass(frozen=True)
class Scored:
    """The scores of the last tokens of a request, on the CPU.

    log_probs  fp32 [scored], natural logarithms
    likeliest  int64 [scored], the token with the largest probability at each place
    is_greedy  whether all scored tokens are the likeliest ones
    """

    log_probs: Tensor
    likeliest: Tensor
    is_greedy: bool

    @property
    def total(self) -> float:
        """The logarithm of the probability of all scored tokens together, summed in fp64."""
        return self.log_probs.double().sum().item()


class Scorer:
    """Scores with the model of `replica`. Weights, optimizer and progress stay as they are.

    tokens_at_once  of a micro-batch at most; None: as many as one has in training
    """

    def __init__(self, replica: Replica, tokens_at_once: int | None = None):
        config = replica.config
        if MODELS[config.model.model].data is not GPT_DATA:
            raise ConfigError(
                f"--model {config.model.model} does not predict the next token from those before it, so texts "
                "have no log-probability under it. Score with a model of that kind, such as gpt."
            )
        self.replica = replica
        self.world = replica.mesh.group("world")
        self.max_length = config.model.positions
        self._tokens = (
            tokens_at_once or config.train.micro_batch_size * config.model.seq_length
        )
        stages = replica.mesh.size("pp")
        self._round = ROUND * stages if stages > 1 else 1

    def check(self, requests: Sequence[ScoreRequest]) -> None:
        """Raises ConfigError for a request that cannot be scored. Not collective."""
        vocab = self.replica.config.model.vocab_size
        assert vocab is not None  # that of its tokenizer
        for number, request in enumerate(requests):
            if not 0 <= request.scored <= request.inputs:
                raise ConfigError(
                    f"request {number}: {request.scored} of {len(request.tokens)} tokens cannot be scored, "
                    "because the first has none before it. Put a token in front, such as end of document."
                )
            if request.inputs > self.max_length:
                raise ConfigError(
                    f"request {number} has {request.inputs} tokens to read, and the model has "
                    f"{self.max_length} positions. Cut the text, or score it in windows."
                )
            least = min(request.tokens)
            most = max(request.tokens)
            if least < 0 or most >= vocab:
                raise ConfigError(
                    f"request {number} has token {least if least < 0 else most}, and the vocabulary is "
                    f"0 to {vocab - 1}. Use the tokenizer of the model."
                )

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """Return the scores of each request, in their order. Collective over the world: all ranks pass the same
        requests, and all have the results. Raises ConfigError on all ranks; see `check`."""
        self.check(requests)
        mesh = self.replica.mesh
        ends = torch.tensor([r.scored for r in requests], dtype=torch.int64).cumsum(0)
        total = int(ends[-1]) if requests else 0
        found = torch.zeros(2, total, device=mesh.device)
        # A round has as many micro-batches as every schedule can run.
        portions = plan_portions(
            [request.inputs for request in requests],
            mesh.samples.size,
            self._tokens,
            self.replica.batches.part.parts,
        )
        with places.phase(places.EVALUATING):
            for first in range(0, len(portions), self._round):
                part = portions[first : first + self._round]
                self._run(part, requests, ends, found)
        # Each number is on one rank and is zero on all others, so the sum is the number.
        all_reduce_(found, self.world)
        parts = to_host(found, self.world).split(
            [request.scored for request in requests], dim=1
        )
        return [_scored(r, part) for r, part in zip(requests, parts, strict=True)]

    def _run(
        self,
        portions: Sequence[Portion],
        requests: Sequence[ScoreRequest],
        ends: Tensor,
        found: Tensor,
    ) -> None:
        """Write what this rank computes of a round to its places in `found` [2, scored tokens]."""
        rank = self.replica.mesh.samples.rank
        batches = self.replica.batches
        made = []
        targets = []
        for portion in portions:
            batch, place = _batch(portion, rank, requests, ends)
            made.append(batch.to(batches.device).cut(batches.part))
            index = batches.part.index(portion.length)
            targets.append(place if index is None else place[:, index])
        # A round that is not full ends with blank micro-batches.
        blank = Portion(((),), 1, batches.part.parts)
        while len(made) < self._round:
            batch, _ = _batch(blank, 0, requests, ends)
            made.append(batch.to(batches.device).cut(batches.part))
        outputs = self._forward(made)
        if self.replica.mesh.coordinate("tp"):
            return
        for place, output in zip(targets, outputs):
            rows, columns = (place >= 0).nonzero(as_tuple=True)
            numbers = torch.stack([part[columns, rows] for part in output])
            found[:, place[rows, columns]] = numbers

    def _forward(self, microbatches: Sequence[Batch]) -> list[TokenScores]:
        """Return the scores of each micro-batch on the ranks of the last stage; [] elsewhere."""
        loss = partial(
            _batch_scores,
            group=self.replica.mesh.group("tp"),
            vocab_size=self.replica.config.model.vocab_size,
        )
        with ExitStack() as inside:
            for stage in self.replica.stages.values():
                inside.enter_context(stage.computing(loss))
            return self.replica.executor.forward(microbatches)


def _batch_scores(logits: Tensor, batch: Batch, **sizes) -> TokenScores:
    return token_scores(logits, batch.labels.t(), **sizes)


def _batch(
    portion: Portion,
    rank: int,
    requests: Sequence[ScoreRequest],
    ends: Tensor,
) -> tuple[Batch, Tensor]:
    """(the whole micro-batch of a rank, int64 [rows, length]: the place of each score, -1 without one).

    Rows are filled up after their text: no position attends to what comes later.
    """
    shape = portion.rows, portion.length
    tokens = torch.zeros(shape, dtype=torch.int64)
    labels = torch.zeros(shape, dtype=torch.int64)
    place = torch.full(shape, -1)
    for row, number in enumerate(portion.requests[rank]):
        request = requests[number]
        ids = torch.tensor(request.tokens)
        count = request.inputs
        tokens[row, :count] = ids[:-1]
        labels[row, :count] = ids[1:]
        end = int(ends[number])
        place[row, count - request.scored : count] = torch.arange(
            end - request.scored, end
        )
    batch = Batch(
        tokens,
        labels,
        torch.ones(shape),
        torch.arange(portion.length).expand(shape),
        sample_ids=tuple(range(portion.rows)),
        training=False,
    )
    return batch, place


def _scored(request: ScoreRequest, found: Tensor) -> Scored:
    """found: fp32 [2, scored], the log-probabilities and the likeliest tokens, which fp32 holds exactly."""
    likeliest = found[1].long()
    targets = torch.tensor(request.tokens[len(request.tokens) - request.scored :])
    return Scored(found[0], likeliest, torch.equal(likeliest, targets.long()))
