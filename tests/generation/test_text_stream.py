"""Text comes in whole characters, ends before a stop string, and is that of all tokens together."""

import random

import pytest

from megatron_ds.data.tokenizers.base import NullTokenizer
from megatron_ds.extensions.generation.requests import GenerationRequest, Sampling
from megatron_ds.extensions.generation.seating import Orders, Seating
from megatron_ds.extensions.generation.text import TextStream

pytestmark = pytest.mark.plan


class Bytes:
    """Each byte is a token."""

    decode = staticmethod(lambda ids: bytes(ids).decode("utf-8", errors="replace"))


TEXT = "naïve 🙂 words — and then STOP, never this"


def streamed(text, stops=()):
    stream = TextStream(Bytes, b"prompt ", stops)
    pieces = []
    for token in text.encode():
        pieces.append(stream.add(token))
        if stream.is_stopped:
            return pieces
    return [*pieces, stream.finish()]


def test_characters_are_whole_and_nothing_is_lost():
    pieces = streamed(TEXT)
    assert "".join(pieces) == TEXT
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert sum(map(bool, pieces)) == len(TEXT)


@pytest.mark.parametrize(
    "stops", [("STOP",), ("nevermore", "STOP"), ("T",), ("absent",), ("", "🙂")]
)
def test_text_ends_before_the_first_stop_string(stops):
    ends = [at for stop in stops if stop and (at := TEXT.find(stop)) >= 0]
    pieces = streamed(TEXT, stops)
    assert "".join(pieces) == TEXT[: min(ends, default=len(TEXT))]


def test_bytes_that_are_no_character_appear_at_the_end():
    stream = TextStream(Bytes)
    assert stream.add(0xF0) == "" and stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_character_that_the_prompt_begins_is_whole():
    begun, rest = "é".encode()[:1], "é!".encode()[1:]
    stream = TextStream(Bytes, b"caf" + begun)
    assert "".join(map(stream.add, rest)) == "é!"


def test_words_are_separated_from_the_prompt():
    stream = TextStream(NullTokenizer(9), (1, 2))
    assert stream.add(3) + stream.add(4) == " 3 4" == stream.text


def test_texts_stand_without_gaps_and_keep_their_keys():
    """Rows of keys are played: each text's row holds its number."""
    draw = random.Random(1)
    seating = Seating(2, 3)
    rows = [[None] * 3, [None] * 3]
    request = lambda: GenerationRequest((1,), Sampling(), draw.randint(1, 5))
    number = 0
    over = set()
    for _ in range(200):
        added = tuple((number + i, request()) for i in range(draw.randint(0, 2)))
        number += len(added)
        cancelled = (draw.randrange(number),) if number and draw.random() < 0.3 else ()
        seating.follow(Orders(added, cancelled))
        for rank, kept in enumerate(rows):
            for source, target, _ in seating.leave(rank):
                kept[target] = kept[source]
        for rank, new in enumerate(seating.admit()):
            texts = seating.seated[rank]
            for row in range(len(texts) - len(new), len(texts)):
                rows[rank][row] = texts[row].number
        for texts, kept in zip(seating.seated, rows, strict=True):
            assert [text.number for text in texts] == kept[: len(texts)]
            assert not over & {text.number for text in texts}
            for text in texts:
                if text.add(2):
                    over.add(text.number)
    assert len(over) > 50
