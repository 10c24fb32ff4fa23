"""Scores of text are those of one process that computes whole logits, under every layout."""

import functools

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.config import parse
from megatron_ds.models import run_layers
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.build import build_engine
from megatron_ds.training.evaluation.score_plan import ScoreRequest
from megatron_ds.training.evaluation.scorer import Scorer
from tests.harness.layout_comparison import parse_layout
from tests.harness.threads import run_ranks

pytestmark = [pytest.mark.threads, pytest.mark.parts(4)]

VOCAB, POSITIONS = 61, 32
JOB = (
    "--num-layers 4 --hidden-size 24 --num-attention-heads 4 --seq-length 16 "
    f"--max-position-embeddings {POSITIONS} --vocab-size {VOCAB} --init-method-std 0.4 "
    "--make-vocab-size-divisible-by 8 --tokenizer-type NullTokenizer --mock-data "
    "--global-batch-size 8 --train-iters 1 --lr 1e-3 --hidden-dropout 0.1"
).split()
GPT = ()
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-router-dtype fp64"
# The last layouts have a vocabulary that ends within a rank's columns, and heads that multiply in chunks.
LAYOUTS = {
    "tp=2": GPT,
    "tp=4,sp=1": LLAMA.split(),
    "pp=2": GPT,
    "pp=2,chunks=2,schedule=interleaved": GPT,
    "pp=4,schedule=zb-h1": GPT,
    "pp=2,schedule=zb-v": LLAMA.split(),
    "cp=2": LLAMA.split(),
    "cp=4,comm_type=a2a": GPT,
    "dp=2,zero=1": GPT,
    "dp=4,zero=3": LLAMA.split(),
    "pp=2,dp=2,zero=3,pin=1": GPT,
    "dp=2,ep=2": EXPERTS.split(),
    "tp=2,dp=2,ep=2,zero=3": EXPERTS.split(),
    "pp=2,cp=2,ep=2,tp=2,sp=1": EXPERTS.split(),
    "tp=2,pp=2,cp=2,sp=1,logits=3": LLAMA.split(),
    "tp=4,pp=2,zero=3,dp=1": GPT,
}


def requests():
    """Texts of all lengths; every third is scored whole, others at their end, one nowhere."""
    draw = torch.Generator().manual_seed(1)
    made = []
    for number in range(37):
        count = int(torch.randint(2, POSITIONS + 2, (), generator=draw))
        tokens = torch.randint(VOCAB, (count,), generator=draw).tolist()
        scored = count - 1 if number % 3 == 0 else min(number % 5, count - 1)
        made.append(ScoreRequest(tuple(tokens), scored))
    return made


@functools.cache
def expected(job):
    """(log-probabilities, likeliest tokens) of each request, scored alone from whole logits."""
    config = parse([*JOB, *job, "--micro-batch-size", "1"])

    def main(rank, world):
        mesh = Mesh(config.grid(1), 0, world.connect, torch.device("cpu"))
        modules = build_engine(config, mesh).modules
        return [alone(modules, request) for request in requests()]

    return run_ranks(1, main)[0]


def alone(modules, request):
    ids = torch.tensor([request.tokens])
    inputs = ids[:, :-1]
    batch = Batch(
        inputs,
        inputs,
        torch.ones(inputs.shape),
        torch.arange(inputs.shape[1])[None],
        sample_ids=(0,),
        training=False,
        ledger=DISCARDING,
    )
    with torch.no_grad():
        logits = run_layers(modules, None, batch)[:, 0, :VOCAB].double()
    log_probs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    first = len(log_probs) - request.scored
    return log_probs[first:].float(), logits.argmax(-1)[first:]


def scores(layout, job, **options):
    wanted = parse_layout(layout, mbs="2")
    config = parse([*JOB, *job, *wanted.flags], world_size=wanted.world_size)
    grid = config.grid(wanted.world_size)

    def main(rank, world):
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        engine = build_engine(config, mesh, trains=False)
        return Scorer(engine, **options).score(requests())

    return run_ranks(wanted.world_size, main)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_whole_logits_in_one_process(layout):
    job = tuple(LAYOUTS[layout])
    for of_rank in scores(layout, job):
        for request, found, (log_probs, likeliest) in zip(
            requests(), of_rank, expected(job), strict=True
        ):
            torch.testing.assert_close(found.log_probs, log_probs, rtol=1e-5, atol=1e-5)
            assert torch.equal(found.likeliest, likeliest)
            targets = request.tokens[len(request.tokens) - request.scored :]
            assert found.is_greedy == (likeliest.tolist() == list(targets))
