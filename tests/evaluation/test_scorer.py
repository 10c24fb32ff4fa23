"""Scores of text are those of one process that computes whole logits, under every layout."""

import functools

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.extensions.evaluation.leading_rank import lead
from megatron_ds.extensions.evaluation.score_plan import ScoreRequest, plan_portions
from megatron_ds.extensions.evaluation.scorer import Scorer
from megatron_ds.models import run_layers
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.build import build_replica
from tests.harness.layout_comparison import parse_layout
from tests.harness.threads import run_ranks

pytestmark = [pytest.mark.threads, pytest.mark.one_in(4)]

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
        modules = build_replica(config, mesh).modules
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
        replica = build_replica(config, mesh, trains=False)
        return Scorer(replica, **options).score(requests())

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


def on_layout(layout, work):
    """`work(scorer, mesh)` of every rank."""
    wanted = parse_layout(layout, mbs="2")
    config = parse([*JOB, *wanted.flags], world_size=wanted.world_size)

    def main(rank, world):
        grid = config.grid(wanted.world_size)
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        return work(Scorer(build_replica(config, mesh, trains=False)), mesh)

    return run_ranks(wanted.world_size, main)


def test_ranks_exchange_a_few_numbers_per_token_and_no_logits():
    def traffic(scorer, mesh):
        mesh.traffic.clear()
        scorer.score(requests())
        return dict(mesh.traffic.bytes)

    read = scored = 0
    for portion in plan_portions([r.inputs for r in requests()], 1, 32, 1):
        read += portion.rows * portion.length
    for request in requests():
        scored += request.scored
    found = on_layout("tp=2,pp=2", traffic)
    blank = 16  # micro-batches that fill the last round
    for rank in found[2:]:  # those of the last stage
        assert rank["all_gather", "tp", 2] <= 4 * 4 * 2 * (read + blank)
    for rank in found:
        assert rank["all_reduce", "tp-cp-dp-pp", 4] == 2 * 4 * scored


def test_no_gradient_and_no_state_is_allocated():
    def held(scorer, mesh):
        return [p.kind for p in scorer.replica.optimizer.pieces()]

    for kinds in on_layout("dp=2,zero=3", held):
        assert set(kinds) == {"weight"}


def test_rank_0_leads_and_its_errors_are_those_of_all_ranks():
    texts = requests()

    def main(scorer, mesh):
        asked = lead(scorer, lambda score: [score(texts[:3]), score(texts[3:])])
        whole = scorer.score(texts)
        both = [found.total for part in asked for found in part]
        assert both == pytest.approx([found.total for found in whole], abs=1e-5)
        long = ScoreRequest((0,) * (POSITIONS + 2), 1)
        for bad, words in (
            (long, "33 tokens to read, and the model has 32"),
            (ScoreRequest((1, 2), 2), "2 of 2 tokens cannot be scored"),
            (ScoreRequest((1, VOCAB + 2), 1), "token 63, and the vocabulary"),
        ):
            with pytest.raises(ConfigError, match=words):
                lead(scorer, lambda score, bad=bad: score([bad]))
        return lead(scorer, lambda score: score([]))

    assert on_layout("pp=2,dp=2", main) == [[]] * 4


def test_a_model_that_does_not_predict_the_next_token_is_refused():
    config = parse([*JOB, "--micro-batch-size", "1", "--model", "bert"])

    def main(rank, world):
        mesh = Mesh(config.grid(1), 0, world.connect, torch.device("cpu"))
        with pytest.raises(ConfigError, match="--model bert does not predict"):
            Scorer(build_replica(config, mesh))

    run_ranks(1, main)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("tokens, multiple", [(1, 1), (64, 4), (1000, 8)])
def test_portions_hold_each_request_once_the_longest_first(ranks, tokens, multiple):
    lengths = [(7 * i + 3) % 31 for i in range(50)]
    portions = plan_portions(lengths, ranks, tokens, multiple)
    dealt = [i for p in portions for rows in p.requests for i in rows]
    assert sorted(dealt) == list(range(50))
    sizes = [portion.length for portion in portions]
    assert sizes == sorted(sizes, reverse=True)
    for portion in portions:
        assert portion.length % multiple == 0 and len(portion.requests) == ranks
        assert portion.rows == 1 or portion.rows * portion.length <= tokens
        for rows in portion.requests:
            assert len(rows) <= portion.rows
            assert all(lengths[i] <= portion.length for i in rows)
