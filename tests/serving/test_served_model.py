"""Answers over a model at several layouts: scores are the scorer's, and texts those of single requests."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.extensions.evaluation.score_plan import ScoreRequest
from megatron_ds.extensions.evaluation.scorer import Scorer
from megatron_ds.extensions.generation.generator import Generator
from megatron_ds.extensions.serving.generation_loop import GenerationLoop
from megatron_ds.extensions.serving.http_service import HttpService
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.build import build_replica
from tests.harness.layout_comparison import parse_layout
from tests.harness.threads import run_ranks
from tests.harness.toy_generator import Served, model_over

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2)]

VOCAB = 258
JOB = (
    "--num-layers 4 --hidden-size 24 --num-attention-heads 4 --seq-length 48 --swiglu "
    f"--position-embedding-type rope --normalization RMSNorm --vocab-size {VOCAB} "
    "--init-method-std 0.4 --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer "
    "--mock-data --global-batch-size 8 --train-iters 1 --lr 1e-3"
).split()
PROMPTS = ["Once upon a time", "x", "Größe", "a longer prompt, of 34 characters."]


def served_at(layout, work):
    """`work(served, scores)` over a model at a layout. scores: of each prompt, by the scorer."""
    wanted = parse_layout(layout, mbs="2")
    config = parse([*JOB, *wanted.flags], world_size=wanted.world_size)
    requests = [ScoreRequest(tuple(p.encode()), len(p.encode()) - 1) for p in PROMPTS]

    def main(rank, world):
        grid = config.grid(wanted.world_size)
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        replica = build_replica(config, mesh, trains=False)
        scores = Scorer(replica).score(requests)
        generator = Generator(replica, requests=3)
        if rank:
            generator.follow()
            return None
        model = model_over(generator, VOCAB)
        served = Served(
            generator, HttpService("127.0.0.1", 0), model, threading.Event()
        )
        loop = GenerationLoop(generator, 64, served.stop.is_set)
        served.service.start(model, loop)
        with ThreadPoolExecutor(1) as client:
            done = client.submit(work, served, scores)
            done.add_done_callback(lambda _: served.stop.set())
            loop.run()
        generator.close()
        served.service.finish(10)
        return done.result()

    return run_ranks(wanted.world_size, main)[0]


@pytest.mark.parametrize("layout", ["dp=1", "tp=2", "pp=2", "pp=2,dp=2"])
def test_an_echo_has_the_scorers_numbers_and_texts_do_not_depend_on_each_other(layout):
    def work(served, scores):
        echo = served.complete(prompt=PROMPTS, echo=True, logprobs=1, max_tokens=1)
        for choice, scored in zip(echo["choices"], scores, strict=True):
            first, *found = choice["logprobs"]["token_logprobs"]
            best = [max(t.values()) for t in choice["logprobs"]["top_logprobs"][1:-1]]
            assert first is None
            # Without the new token.
            assert found[:-1] == pytest.approx(scored.log_probs.tolist(), abs=1e-5)
            assert scored.is_greedy == (found[:-1] == best)
        ask = lambda prompt: served.complete(
            prompt=prompt, max_tokens=9, temperature=0, ignore_eos=True
        )
        alone = [ask(prompt)["choices"][0]["text"] for prompt in PROMPTS]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, PROMPTS))
        assert [answer["choices"][0]["text"] for answer in answers] == alone
        assert len(set(alone)) > 1
        return alone

    assert len(served_at(layout, work)) == len(PROMPTS)
