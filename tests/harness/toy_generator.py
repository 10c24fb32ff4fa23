"""A server over a generator without a model, whose next token is a function of the text so far.

`ToyGenerator` has the interface of `megatron_ds.extensions.generation.generator.Generator`.
"""

import http.client
import itertools
import json
import math
import random
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_ds.errors import CallError, ConfigError
from megatron_ds.extensions.chat.template import ChatTemplate
from megatron_ds.extensions.generation.requests import GeneratedToken
from megatron_ds.extensions.serving.generation_loop import GenerationLoop
from megatron_ds.extensions.serving.http_service import HttpService
from megatron_ds.extensions.serving.served_model import ServedModel
from tests.harness.limits import HUNG

BEGIN, END = 256, 257


def until(condition):
    """Wait for a condition of another thread."""
    deadline = time.monotonic() + HUNG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def scores_after(tokens, vocab_size):
    """Log-probabilities of the next token."""
    draw = random.Random(repr(tuple(tokens)))
    logits = [draw.uniform(0, 4) for _ in range(vocab_size)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


class ToyGenerator:
    """failure: an error that `step` raises once it is set; pause: seconds of a step; hard: a token of a prompt
    that none can follow."""

    def __init__(self, vocab_size=258, max_length=64, pause=0.0):
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.pause = pause
        self.failure = None
        self.hard = None
        self.gate = threading.Event()  # while it is not set, steps yield nothing
        self.gate.set()
        self.cancelled = []
        self.running = {}
        self.is_closed = False
        self._scores = {}
        self._numbers = itertools.count()

    def check(self, request):
        if len(request.tokens) + request.max_new_tokens > self.max_length:
            raise ConfigError(f"a text has at most {self.max_length} tokens.")

    def add(self, request):
        self.check(request)
        number = next(self._numbers)
        self.running[number] = (request, [])
        if request.scores_prompt:
            self._scores[number] = self._prompt_scores(request)
        return number

    def cancel(self, number):
        self.cancelled.append(number)
        self.running.pop(number, None)

    def step(self):
        if self.failure is not None:
            raise self.failure
        time.sleep(self.pause)
        if not self.gate.is_set():
            time.sleep(0.002)
            return []
        events = []
        for number, (request, new) in list(self.running.items()):
            before = (*request.tokens, *new)
            if self.hard in request.tokens:
                del self.running[number]
                events.append((number, CallError(f"no token can follow {self.hard}")))
                continue
            scores = scores_after(before, self.vocab_size)
            new.append(self._choice(request, scores, len(new)))
            finish = "length" if len(new) == request.max_new_tokens else None
            finish = "stop" if new[-1] in request.stop_tokens else finish
            if finish:
                del self.running[number]
            events.append((number, self._token(request, new[-1], scores, finish)))
        return events

    def prompt_scores(self, number):
        return self._scores.pop(number)

    def close(self):
        self.is_closed = True

    def _prompt_scores(self, request):
        tokens = request.tokens
        found = [GeneratedToken(tokens[0])]
        for place in range(1, len(tokens)):
            scores = scores_after(tokens[:place], self.vocab_size)
            found.append(self._token(request, tokens[place], scores))
        return found

    @staticmethod
    def _choice(request, scores, step):
        if request.sampling.temperature == 0 or request.sampling.top_k == 1:
            return scores.index(max(scores))
        draw = random.Random(f"{request.sampling.seed} {step}")
        return draw.choices(range(len(scores)), [math.exp(s) for s in scores])[0]

    @staticmethod
    def _token(request, token, scores, finish=None):
        if request.alternatives is None:
            return GeneratedToken(token, finish=finish)
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        best = tuple((i, scores[i]) for i in order[: request.alternatives])
        return GeneratedToken(token, scores[token], best, finish)


class ByteTokenizer:
    """The bytes of UTF-8, and two special tokens."""

    vocab_size = 258
    eod = END
    special_ids = frozenset((BEGIN, END))
    names = {BEGIN: b"<begin>", END: b"<end>"}

    def encode(self, text):
        return self.encode_with_offsets(text)[0]

    def encode_batch(self, texts):
        return list(map(self.encode, texts))

    def encode_with_offsets(self, text):
        ids = []
        offsets = []
        for place, letter in enumerate(text):
            new = letter.encode()
            ids += new
            offsets += [(place, place + 1)] * len(new)
        return ids, offsets

    def decode(self, ids):
        parts = [self.names.get(i) or bytes((i,)) for i in ids]
        return b"".join(parts).decode("utf-8", "replace")


@dataclass
class Served:
    """A running server. stop: makes it end; error: what its loop raised."""

    generator: ToyGenerator
    service: HttpService
    model: ServedModel
    stop: threading.Event
    error: BaseException | None = None

    @property
    def address(self):
        return self.service.address

    def ask(self, method, path, body=None, headers=()):
        """(status, JSON or text, headers) of a request on a connection of its own."""
        connection = http.client.HTTPConnection(*self.address, timeout=HUNG)
        data = json.dumps(body) if isinstance(body, dict | list) else body
        connection.request(method, path, data, dict(headers))
        answer = connection.getresponse()
        content = answer.read().decode()
        found = answer.headers
        connection.close()
        if found["Content-Type"] == "application/json":
            content = json.loads(content)
        return answer.status, content, found

    def complete(self, **body):
        """The answer of /v1/completions, which must be good."""
        status, content, _ = self.ask("POST", "/v1/completions", body)
        assert status == 200, content
        return content


def model_over(generator, vocab_size, tokenizer=None, template=None):
    """What endpoints know of a generator."""
    return ServedModel(
        "toy",
        tokenizer or ByteTokenizer(),
        generator.max_length,
        vocab_size,
        generator.check,
        template and ChatTemplate(template),
    )


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@contextmanager
def serving(generator=None, tokenizer=None, template=TEMPLATE, most=64, origins=()):
    """A server in threads of this process, until the end of the block."""
    generator = generator or ToyGenerator()
    model = model_over(generator, generator.vocab_size, tokenizer, template)
    served = Served(
        generator, HttpService("127.0.0.1", 0, origins), model, threading.Event()
    )
    loop = GenerationLoop(generator, most, served.stop.is_set)

    def main():
        try:
            loop.run()
        except BaseException as error:
            served.error = error

    served.service.start(model, loop)
    thread = threading.Thread(target=main)
    thread.start()
    try:
        yield served
    finally:
        served.stop.set()
        generator.gate.set()
        thread.join(60)
        assert not thread.is_alive()
        served.service.finish(10)
