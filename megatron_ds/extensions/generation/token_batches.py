"""Micro-batches of a generation step: prompts that are read, and the newest token of each text.

A micro-batch is one row [1, s] of tokens, so that texts of any lengths stand side by side without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...batch.batch import Batch
from ...host.device_copies import on_device
from ...ops.key_rows import KeyRows
from .cached_keys import CachedKeys, PromptPast, TextPast
from .choice import Pick
from .seating import Text


@dataclass(frozen=True)
class BatchPart:
    """Texts of a micro-batch, in rows of keys from `first` on. is_new: their prompts are read."""

    texts: tuple[Text, ...] = ()
    first: int = 0
    is_new: bool = True

    @property
    def picks(self) -> list[tuple[Text, Pick]]:
        """What is wanted of each row of logits, in the order of the rows."""
        found = []
        for text in self.texts:
            if self.is_new:
                found += [(text, pick) for pick in _prompt_picks(text)]
            found.append((text, _next_pick(text)))
        return found


def plan(
    texts: Sequence[Text], new: Sequence[Text], parts: int, most: int
) -> list[BatchPart]:
    """Return the micro-batches of a rank: those of prompts, then those of the texts before them.

    texts  all texts of the rank, by row; the new ones are the last
    parts  number of micro-batches of texts, at most: as many as there are pipeline stages
    most   tokens of a micro-batch of prompts, unless one prompt has more
    """
    made = []
    old = len(texts) - len(new)
    row = old
    for group in _groups(new, most):
        made.append(BatchPart(tuple(group), row))
        row += len(group)
    # Nearly equal parts keep all stages of a pipeline busy.
    parts = min(parts, old)
    for part in range(parts):
        first = old * part // parts
        stop = old * (part + 1) // parts
        made.append(BatchPart(tuple(texts[first:stop]), first, is_new=False))
    return made


def _groups(texts: Sequence[Text], most: int) -> list[list[Text]]:
    """Group consecutive texts: the prompts of a group have at most `most` tokens, unless it is a single one."""
    groups: list[list[Text]] = []
    room = 0
    for text in texts:
        length = len(text.request.tokens)
        if not groups or length > room or text.is_alone:
            groups.append([])
            room = most
        groups[-1].append(text)
        room = 0 if text.is_alone else room - length
    return groups


def make_batch(
    part: BatchPart, cached: CachedKeys, multiple: int, device: torch.device
) -> Batch:
    """Return the micro-batch, on the device. Its number of tokens is a multiple of `multiple`."""
    row = _row_of(part, cached)
    # Tokens that belong to no text fill it up.
    count = len(row.tokens)
    missing = -count % multiple if count else multiple
    for _ in range(missing):
        row.add(0, 0, cached.spare, len(part.texts))
    # Prompts do not see each other.
    documents = None
    if part.is_new and row.documents[-1] > 0:
        documents = torch.tensor(row.documents)[None]
    ids = torch.tensor(row.tokens)[None]
    batch = Batch(
        ids,
        ids,
        torch.ones(ids.shape),
        torch.tensor(row.positions)[None],
        sample_ids=(0,),
        training=False,
        document_ids=documents,
        past=_past(part, cached, row, device),
    )
    return batch if device.type == "cpu" else batch.pin().to(device)


@dataclass
class _Row:
    """Tokens of a micro-batch, where they stand in their texts and in the cache, and the number of the text."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    documents: list[int] = field(default_factory=list)

    def add(self, token: int, position: int, place: int, document: int) -> None:
        self.tokens.append(token)
        self.positions.append(position)
        self.places.append(place)
        self.documents.append(document)


def _row_of(part: BatchPart, cached: CachedKeys) -> _Row:
    row = _Row()
    for number, text in enumerate(part.texts):
        tokens = text.request.tokens if part.is_new else text.new[-1:]
        first = 0 if part.is_new else text.cached
        for position, token in enumerate(tokens, first):
            place = cached.place(part.first + number, position)
            row.add(token, position, place, number)
    return row


def _past(
    part: BatchPart, cached: CachedKeys, row: _Row, device: torch.device
) -> PromptPast | TextPast:
    on = lambda numbers: on_device(torch.tensor(numbers, dtype=torch.int64), device)
    places = on(row.places)
    if part.is_new:
        wanted = on(_wanted(part))
        ends = on(_ends(part))
        return PromptPast(
            cached,
            places,
            wanted,
            part.first,
            ends,
        )
    count = len(part.texts)
    last = row.positions[:count]
    rows = KeyRows(on(last)[:, None], max(last) + 1, min(last) == max(last))
    return TextPast(cached, places, on([*range(count)]), part.first, rows)


def _ends(part: BatchPart) -> list[int]:
    """Places of the last tokens of prompts in a micro-batch."""
    found = []
    end = 0
    for text in part.texts:
        end += len(text.request.tokens)
        found.append(end - 1)
    return found


def _wanted(part: BatchPart) -> list[int]:
    """Positions in a micro-batch of prompts whose logits are wanted."""
    found: list[int] = []
    end = 0
    for text in part.texts:
        first = end
        end += len(text.request.tokens)
        found += range(first if text.request.scores_prompt else end - 1, end)
    return found


def _prompt_picks(text: Text) -> list[Pick]:
    """Yield a pick for each token of the prompt but the first, if they are scored."""
    request = text.request
    if not request.scores_prompt:
        return []
    return [
        Pick(request.sampling, given=token, alternatives=request.alternatives)
        for token in request.tokens[1:]
    ]


def _next_pick(text: Text) -> Pick:
    request = text.request
    penalizes = request.sampling.repetition_penalty != 1
    return Pick(
        request.sampling,
        step=len(text.new),
        forbidden=text.forbidden,
        seen=frozenset(text.tokens if penalizes else ()),
        alternatives=request.alternatives,
    )
