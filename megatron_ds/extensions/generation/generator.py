"""`Generator`: continues texts with the model of a replica, under any layout but context parallelism.

Requests join and leave between steps. A step is one forward of the replica's pipeline: the prompts of requests that
join, and one token of each text under way. Data-parallel ranks share the requests. Logits stay on the ranks of the
last stage; all ranks get the tokens that were chosen, and their log-probabilities.

    rank 0       generator = Generator(replica)            the others      Generator(replica).follow()
                 number = generator.add(request)
                 for number, token in generator.step():
                     ...
                 generator.close()

Batches that change between steps: Yu et al. 2022 ("Orca", OSDI), section 4.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from ...batch.batch import Batch
from ...data.samples.gpt_data import GPT_DATA
from ...errors import CallError, ConfigError
from ...host import places
from ...models import MODELS
from ...models.attention_layouts import attention_layouts
from ...models.mixers import mixer_of
from ...mpu.collectives import all_gather, all_gather_object, all_reduce_
from ...mpu.host_reads import to_host
from ...training.build import Replica
from .cached_keys import CachedKeys
from .choice import NO_TOKEN, Pick, choose
from .requests import GeneratedToken, GenerationRequest
from .seating import Orders, Seating, Text
from .token_batches import BatchPart, make_batch, plan

PROMPT_TOKENS = 2048  # of a micro-batch of several prompts, at most
ROWS = 512  # of logits whose probabilities, in fp64, are in memory at once
Event = tuple[int, GeneratedToken | CallError]
Picked = list[tuple[Text, Pick]]  # of a rank, in the order of its logits


class Generator:
    """Built by all ranks; rank 0 leads, and the others call `follow`. Weights and progress stay as they are.

    requests  under way at once on each data-parallel rank; others wait
    length    tokens that are read of a text, prompt included, at most; None: as many as the model has positions. Keys
              and values of requests × length tokens are kept
    """

    def __init__(
        self, replica: Replica, *, requests: int = 16, length: int | None = None
    ):
        config = replica.config
        _check_model(config.model.model, config.parallel.context_parallel_size)
        if requests < 1:
            raise ConfigError(
                f"requests={requests} at once generate nothing. Use 1 or more."
            )
        mesh = replica.mesh
        vocab = config.model.vocab_size
        assert vocab is not None  # that of its tokenizer
        self._vocab = vocab
        positions = config.model.positions
        self.max_length = positions if length is None else min(length, positions)
        self._engine = replica
        self._world = mesh.group("world")
        self._seating = Seating(mesh.samples.size, requests)
        self._cached = CachedKeys(requests, self.max_length)
        # Blocks of keys are counted from the beginning of a row, so prompts of sparse attention stand alone.
        is_sparse = attention_layouts().block_length(config.model) > 1
        self._prompt_tokens = 0 if is_sparse else min(PROMPT_TOKENS, positions)
        self._keeps_all_layers = False
        self._trains = any(p.requires_grad for p in replica.parameters)
        # Orders of the leader, and what it has for callers.
        self._numbers = itertools.count()
        self._added: deque[tuple[int, GenerationRequest]] = deque()
        self._cancelled: deque[int] = deque()
        self._prompt_scores: dict[int, list[GeneratedToken]] = {}

    def check(self, request: GenerationRequest) -> None:
        """Raises ConfigError for a request that cannot run. Not collective."""
        vocab = self._vocab
        # The model does not read the last token.
        read = len(request.tokens) + request.max_new_tokens - 1
        if read > self.max_length:
            raise ConfigError(
                f"a prompt of {len(request.tokens)} tokens and {request.max_new_tokens} new ones, the last of which is "
                f"not read, take {read} places, and a text has at most {self.max_length}. Shorten the prompt, or "
                "generate fewer tokens."
            )
        known = (*request.tokens, *request.stop_tokens)
        if min(known) < 0 or max(known) >= vocab:
            wrong = min(known) if min(known) < 0 else max(known)
            raise ConfigError(
                f"token {wrong} is not in the vocabulary, which is 0 to {vocab - 1}. Use the tokenizer of the model."
            )
        if request.min_new_tokens and len(request.stop_tokens) == vocab:
            raise ConfigError(
                f"min_new_tokens={request.min_new_tokens} forbids all {vocab} tokens, which are stop tokens. Use 0, or "
                "fewer stop tokens."
            )
        if (request.alternatives or 0) > vocab:
            raise ConfigError(
                f"alternatives={request.alternatives} exceeds the vocabulary of {vocab} tokens. Use fewer."
            )

    def add(self, request: GenerationRequest) -> int:
        """Return the number of a request, which begins in a later step, once there is room. Rank 0; may be called
        while another thread is in `step`. Raises ConfigError; see `check`."""
        self.check(request)
        number = next(self._numbers)
        self._added.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """End a request before the next step. No effect on one that is over. Rank 0, any thread."""
        self._cancelled.append(number)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and nothing waits."""
        return not self._added and self._seating.is_idle

    def step(self) -> list[Event]:
        """Generate a token of each request under way; return (number, token) of each, [] when idle. In place of a token
        an error ends a single request, for which the model has no token. Rank 0; collective over the
        world with the others in `follow`, also when idle, so that they see that the leader is alive."""
        orders = Orders(tuple(_taken(self._added)), tuple(_taken(self._cancelled)))
        all_gather_object(orders, self._world)
        return self._advance(orders)

    def prompt_scores(self, number: int) -> list[GeneratedToken]:
        """Return the prompt's tokens of a request with `scores_prompt`, once, after the step that returned its first
        new token. Rank 0."""
        return self._prompt_scores.pop(number)

    def run(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedToken]]:
        """Return all tokens of each request. Rank 0, with the others in `follow`. Raises CallError if
        the model has no token for one."""
        numbers = [self.add(request) for request in requests]
        texts: dict[int, list[GeneratedToken]] = {number: [] for number in numbers}
        while not self.is_idle:
            for number, token in self.step():
                texts[number].append(required(token))
        return [texts[number] for number in numbers]

    def follow(self) -> None:
        """Take part in the steps of rank 0, until it closes. Returns at once on rank 0."""
        if self._world.rank == 0:
            return
        while (orders := all_gather_object(None, self._world)[0]) is not None:
            self._advance(orders)
            self._prompt_scores.clear()  # rank 0 alone is asked for them

    def close(self) -> None:
        """Let the other ranks return from `follow`. Rank 0."""
        if self._world.rank == 0:
            all_gather_object(None, self._world)

    def _advance(self, orders: Orders) -> list[Event]:
        """Make a step of all ranks, which have the same seating and get the same tokens."""
        # Texts that are over leave, and others take their rows.
        seating = self._seating
        seating.follow(orders)
        for number in orders.cancelled:
            self._prompt_scores.pop(number, None)
        mine = self._engine.mesh.samples.rank
        self._cached.clear(seating.failed_rows(mine))
        for rank in range(len(seating.seated)):
            for move in seating.leave(rank):
                if rank == mine:
                    self._cached.move(*move)
        new = seating.admit()
        # Every rank knows the micro-batches of all ranks, and so the order of their results.
        stages = self._engine.mesh.size("pp")
        parts = [
            plan(texts, fresh, stages, self._prompt_tokens)
            for texts, fresh in zip(seating.seated, new, strict=True)
        ]
        picked = [_picks(of_rank) for of_rank in parts]
        if not any(picked):
            return []
        found = self._chosen(parts, picked)
        if not self._keeps_all_layers:
            self._check_layers()
        everything = itertools.chain.from_iterable(picked)
        return self._events(everything, found.tolist())

    def _check_layers(self) -> None:
        """Raises ConfigError on all ranks when a layer keeps neither keys nor a state, which texts would lack
        from the second token on. Collective over the world, after the first forward."""
        names = all_gather_object(self._cached.layers, self._world)
        kept = len(set().union(*names))
        model = self._engine.config.model
        wanted = sum(mixer_of(model, i).pasts for i in range(model.num_layers))
        if kept < wanted:
            raise ConfigError(
                f"--model {model.model} has {wanted} layers in which tokens meet, and {kept} of them keep keys and "
                "values, or a state, for generation. Let an attention of your own call batch.past.attend where there "
                "is a batch.past, as models/attention.py does, and a layer with a state batch.past.recur."
            )
        self._keeps_all_layers = True

    def _chosen(
        self, parts: Sequence[Sequence[BatchPart]], picked: Sequence[Picked]
    ) -> Tensor:
        """fp64 [r, 2 + 2n] on the CPU, rows of `choose` for what all data-parallel ranks pick, in order."""
        mesh = self._engine.mesh
        mine = mesh.samples.rank
        # The results of this rank follow those of the ranks before it.
        counts = [len(of_rank) for of_rank in picked]
        picks = [[pick for _, pick in of_rank] for of_rank in picked]
        most = max(p.alternatives or 0 for of_rank in picks for p in of_rank)
        found = torch.zeros(
            sum(counts), 2 + 2 * most, dtype=torch.float64, device=mesh.device
        )
        # All pipelines run the same number of micro-batches.
        blank = [BatchPart()] * (max(map(len, parts)) - len(parts[mine]))
        with places.phase(places.EVALUATING):
            logits = self._logits([*parts[mine], *blank])
            if logits is not None and counts[mine]:
                own = self._choose(logits, picks[mine], most)
                if mesh.coordinate("tp") == 0:
                    first = sum(counts[:mine])
                    found[first : first + len(own)] = own
        # Each number is on one rank and is zero on all others, so the sum is the number.
        all_reduce_(found, self._world)
        return to_host(found, self._world)

    def _logits(self, parts: Sequence[BatchPart]) -> Tensor | None:
        """[r, Vp/t] of what is wanted of the micro-batches, on the ranks of the last stage; None elsewhere."""
        replica = self._engine
        multiple = replica.batches.part.parts
        device = replica.mesh.device
        # Only prompts make tensors that a training shares, and inference mode would forbid these to it.
        is_apart = not self._trains and not any(part.is_new for part in parts)
        with torch.inference_mode(is_apart):
            batches = [make_batch(p, self._cached, multiple, device) for p in parts]
            outputs = _forward(replica, batches)
        return torch.cat([o.objective for o in outputs]) if outputs else None

    def _choose(self, logits: Tensor, picks: Sequence[Pick], most: int) -> Tensor:
        """Collective over tp. Scores of long prompts are computed in parts."""
        found = []
        for first in range(0, len(picks), ROWS):
            part = slice(first, first + ROWS)
            whole = all_gather(logits[part], self._engine.mesh.group("tp"), dim=-1)
            found.append(choose(whole[:, : self._vocab], picks[part], most))
        return torch.cat(found)

    def _events(
        self, picked: Iterable[tuple[Text, Pick]], found: list[list[float]]
    ) -> list[Event]:
        """Add the tokens to their texts."""
        # A token that was given is one of a prompt, any other is new.
        events: list[Event] = []
        for (text, pick), row in zip(picked, found, strict=True):
            if pick.given is not None:
                self._scores_of(text).append(_token(row, pick))
            elif int(row[0]) == NO_TOKEN:
                self._prompt_scores.pop(text.number, None)
                if self._seating.fail(text):
                    events.append((text.number, _no_token(text)))
            else:
                if text.request.scores_prompt and not text.new:
                    self._scores_of(text)
                finish = text.add(int(row[0]))
                events.append((text.number, _token(row, pick, finish)))
        return events

    def _scores_of(self, text: Text) -> list[GeneratedToken]:
        """Return the scores of the prompt's tokens so far. The first token has no probability."""
        first = GeneratedToken(text.request.tokens[0])
        return self._prompt_scores.setdefault(text.number, [first])


def _picks(parts: Sequence[BatchPart]) -> Picked:
    return [each for part in parts for each in part.picks]


class _WantedLogits(NamedTuple):
    """objective: [r, Vp/t], under the name that a pipeline stage reads."""

    objective: Tensor


def _wanted_logits(logits: Tensor, batch: Batch) -> _WantedLogits:
    return _WantedLogits(logits[:, 0])


def _forward(replica: Replica, batches: Sequence[Batch]) -> list[_WantedLogits]:
    """Return the logits of each micro-batch on the ranks of the last stage; [] elsewhere."""
    with ExitStack() as inside:
        for stage in replica.stages.values():
            inside.enter_context(stage.computing(_wanted_logits))
        return replica.executor.forward(batches)


def _no_token(text: Text) -> CallError:
    return CallError(
        f"no token can follow the first {len(text.tokens)} of a text: the model's scores are infinite or not "
        "numbers, or all tokens are forbidden. Use another checkpoint, or --bf16 or fp32 instead of --fp16."
    )


def required(token: GeneratedToken | CallError) -> GeneratedToken:
    """Return the token of an event. Raises the error that an event has in its place."""
    if isinstance(token, CallError):
        raise token
    return token


def _token(
    row: Sequence[float], pick: Pick, finish: str | None = None
) -> GeneratedToken:
    """Return the token of a row of `choose`."""
    token = int(row[0])
    if pick.alternatives is None:
        return GeneratedToken(token, finish=finish)
    most = (len(row) - 2) // 2
    likeliest = zip(map(int, row[2 : 2 + most]), row[2 + most :], strict=True)
    found = tuple(itertools.islice(likeliest, pick.alternatives))
    return GeneratedToken(token, row[1], found, finish)


def _taken(queue: deque) -> Iterator:
    """Take all elements of a queue to which another thread may append."""
    while queue:
        yield queue.popleft()


def _check_model(model: str, context_parallel_size: int) -> None:
    """Raises ConfigError for a model or a layout that cannot generate."""
    if MODELS[model].data is not GPT_DATA:
        raise ConfigError(
            f"--model {model} does not predict the next token from those before it, so it continues no text. Use a "
            "model of that kind, such as gpt."
        )
    if context_parallel_size > 1:
        raise ConfigError(
            f"--context-parallel-size {context_parallel_size}: each rank keeps the keys of whole texts. Use 1; "
            "checkpoints of every size load."
        )
