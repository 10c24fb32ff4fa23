"""Generated texts are those of transformers and of whole forwards, under every layout and beside any other texts."""

import functools
from dataclasses import replace

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.batch.ledger import DISCARDING
from megatron_ds.config import parse
from megatron_ds.errors import CallError, ConfigError
from megatron_ds.extensions.generation import choice
from megatron_ds.extensions.generation import generator as generator_module
from megatron_ds.extensions.generation.generator import Generator
from megatron_ds.extensions.generation.requests import GenerationRequest, Sampling
from megatron_ds.models import run_layers
from megatron_ds.models.attention import SelfAttention
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.tensor_parallel.vocabulary import VocabParallelEmbedding
from megatron_ds.training.build import build_replica
from tests.evaluation.test_evaluation_harness import at_layout, theirs
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
GPT = ""
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights"
)
EXPERTS = (
    f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-router-dtype fp64 "
    "--moe-expert-capacity-factor 1 --moe-eval-capacity-factor 0.5"
)
LATENT = (
    "--multi-latent-attention --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5 "
    "--qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear"
)
STATES = (
    "--linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 6 --linear-value-head-dim 4 "
    "--mamba-num-groups 4 --mamba-num-heads 8 --mamba-head-dim 6 --mamba-state-dim 5"
)
HYBRID = (
    f"{STATES} --linear-attention-freq 4 --attention-output-gate {LLAMA} --qk-layernorm"
)
HALVES = (
    f"{STATES} --mixer-pattern M*EG-MG --num-layers 7 --num-experts 4 --moe-router-topk 2 --moe-router-dtype fp64 "
    "--disable-bias-linear --normalization RMSNorm --squared-relu --position-embedding-type none"
)
LAYOUTS = {
    "dp=1": EXPERTS,
    "tp=2": GPT,
    "tp=4,sp=1": LLAMA,
    "pp=2,chunks=2,schedule=interleaved": GPT,
    "pp=2,schedule=zb-v": LLAMA,
    "dp=2,zero=3": LLAMA,
    "pp=2,dp=2,zero=3,pin=1": GPT,
    "dp=2,ep=2": EXPERTS,
    "tp=2,sp=1,pp=2": LATENT,
    "tp=2,dp=2,ep=2,zero=3": EXPERTS,
    "tp=2,pp=2,sp=1,logits=3": LLAMA,
    "tp=2,sp=1": HYBRID,
    "tp=2,dp=2": HALVES,
    "pp=2,dp=2,zero=3": HALVES,
}
# What attention computes besides causal products, of which a text's next token shows every mistake.
FEATURES = {
    "alibi": "--position-embedding-type alibi",
    "windows": f"{LLAMA} --window-size 3,0 --window-attn-skip-freq 2",
    "sinks": "--window-size 4,0 --softmax-type learnable",
    "blocks": f"{LLAMA} --sparse-attention local --sparse-block 2",
    "normalized heads": f"{LLAMA} --qk-layernorm --group-query-attention --num-query-groups 2",
    "yarn": f"{LLAMA} --position-embedding-type yarn --rotary-scaling-factor 3 --original-max-position-embeddings 16",
    "alibi and sinks": "--position-embedding-type alibi --softmax-type off-by-one",
    "experts": f"{LLAMA} --num-experts 4 --moe-router-noise gumbel --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss --moe-expert-capacity-factor 0.6 "
    "--moe-shared-expert-intermediate-size 16 --moe-router-topk 2",
    "scaled scores, norms behind": f"{LLAMA} --norm-after-sublayer --softmax-scale 0.9 --window-size 3,0 "
    "--window-attn-skip-freq 2 --window-rotary-base 50 --embedding-multiplier 2",
    "soft caps": f"{LLAMA} --attention-logit-softcapping 0.4 --final-logit-softcapping 2",
    "one norm, biases": "--position-embedding-type rope --rotary-percent 0.34 --use-parallel-residual "
    "--shared-block-norm --output-layer-bias --untie-embeddings-and-output-weights --disable-bias-in-attn-linear",
    "factors, layers without positions": f"{LLAMA} --residual-multiplier 0.7 --logit-multiplier 2 --no-rope-freq 2",
    "latents": f"{LATENT} --q-lora-rank 8 --rope-type yarn --rotary-scaling-factor 3 --mscale-all-dim 0.8 "
    "--original-max-position-embeddings 16",
    "latents, queries without one, windows": f"{LATENT} --window-size 3,0",
    "gated delta nets": HYBRID,
    "Mamba-2": f"{STATES} --linear-attention-freq [1,0,1,1] --linear-attention-type mamba",
    "halves of blocks": HALVES,
    "Mamba-2 beside attention": f"{LLAMA} {STATES} --linear-attention-freq [1,1,0,1] --linear-attention-type "
    "mamba_beside_attention --mamba-norm none --mixer-multipliers 0.9 0.8 1.3 0.5 0.4 0.3 0.7 1.2 0.3 0.9 0.6",
    "recomputed states": f"{HYBRID} --recompute-granularity selective",
    "recomputed": "--recompute-granularity full --recompute-method uniform",
}


def prompts(count=7, longest=12):
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest, (count,), generator=draw).tolist()
    return [tuple(torch.randint(VOCAB, (n,), generator=draw).tolist()) for n in lengths]


def sampled():
    """Requests of which no two are sampled alike; some score their prompts."""
    return [
        GenerationRequest(
            tokens,
            Sampling(
                temperature=(0.0, 0.8, 1.3)[i % 3],
                top_k=20 * (i % 2),
                top_p=0.8 if i % 3 == 1 else 1.0,
                min_p=0.05 * (i % 3),
                repetition_penalty=1.3 if i % 3 == 2 else 1.0,
                seed=i,
            ),
            max_new_tokens=5 + i,
            alternatives=(None, 0, 2)[i % 3],
            scores_prompt=i % 3 == 2,
        )
        for i, tokens in enumerate(prompts())
    ]


def on_layout(layout, job, work, **limits):
    """What `work(generator, replica)` of rank 0 returns; the other ranks follow it."""
    wanted = parse_layout(layout, mbs="2")
    flags = [*JOB, *job.split(), *wanted.flags]
    config = parse(flags, world_size=wanted.world_size)

    def main(rank, world):
        grid = config.grid(wanted.world_size)
        mesh = Mesh(grid, rank, world.connect, torch.device("cpu"))
        return led(build_replica(config, mesh, trains=False), work, **limits)

    return run_ranks(wanted.world_size, main)[0]


def led(replica, work, **limits):
    generator = Generator(replica, **limits)
    if replica.mesh.rank:
        return generator.follow()
    try:
        return work(generator, replica)
    finally:
        generator.close()


def texts_of(generator, requests):
    """Tokens, and all log-probabilities, the prompts' too."""
    made = generator.run(requests)
    scored = [
        generator.prompt_scores(i) for i, r in enumerate(requests) if r.scores_prompt
    ]
    tokens = [[token.token for token in text] for text in made]
    probabilities = [
        [token.log_prob or 0.0, *(p for _, p in token.alternatives)]
        for text in (*made, *scored)
        for token in text
    ]
    return tokens, [p for token in probabilities for p in token]


@functools.cache
def alone(job):
    """Each request by itself, in one process."""

    def work(_, replica):
        found = []
        for request in sampled():
            with_room = Generator(replica, requests=1)
            found.append(with_room.run([request]))
        return [[token.token for token in text] for (text,) in found]

    return on_layout("dp=1", job, work)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_texts_depend_neither_on_the_layout_nor_on_the_texts_beside_them(
    layout,
):
    job = LAYOUTS[layout]

    def work(generator, replica):
        return texts_of(generator, sampled())

    tokens, probabilities = on_layout(layout, job, work)
    assert tokens == alone(job)
    assert len({tuple(text) for text in tokens}) == len(tokens)
    _, expected = on_layout("dp=1", job, work)
    assert probabilities == pytest.approx(expected, abs=1e-4)


def whole_logits(modules, text):
    """[s, V] of a forward over a whole text, without a cache."""
    ids = torch.tensor([text])
    batch = Batch(
        ids,
        ids,
        torch.ones(ids.shape),
        torch.arange(len(text))[None],
        sample_ids=(0,),
        training=False,
        ledger=DISCARDING,
    )
    with torch.no_grad():
        return run_layers(modules, None, batch)[:, 0, :VOCAB].double()


@pytest.mark.parametrize("feature", FEATURES)
def test_greedy_texts_are_the_argmax_of_forwards_over_whole_texts(feature):
    def work(generator, replica):
        requests = [
            GenerationRequest(
                tokens, Sampling(0.0), 9 + i, alternatives=3, scores_prompt=True
            )
            for i, tokens in enumerate(prompts(4))
        ]
        made = generator.run(requests)
        for number, (request, text) in enumerate(zip(requests, made, strict=True)):
            whole = [*request.tokens, *(token.token for token in text)]
            logits = whole_logits(replica.modules, whole)[:-1]
            likeliest = logits.argmax(-1).tolist()
            assert whole[len(request.tokens) :] == likeliest[len(request.tokens) - 1 :]
            # Log-probabilities of the prompt and of the text, and the likeliest tokens.
            log_probs = logits.log_softmax(-1)
            first, *scored = [*generator.prompt_scores(number), *text]
            assert first.log_prob is None and first.token == whole[0]
            for row, token in zip(log_probs, scored, strict=True):
                assert token.log_prob == pytest.approx(
                    row[token.token].item(), abs=2e-5
                )
                best = row.topk(3)
                assert [t for t, _ in token.alternatives] == best.indices.tolist()
        return [[token.token for token in text] for text in made]

    texts = on_layout("dp=1", FEATURES[feature], work)
    assert max(len(set(text)) for text in texts) > 3


CASES = [
    ("gpt2", "tp=2"),
    ("gpt2", "pp=2"),
    ("llama", "tp=2,pp=2"),
    ("llama", "dp=2,zero=3"),
    ("mixtral", "dp=2,ep=2"),
    ("mixtral", "tp=2,pp=2"),
    ("granite", "tp=2"),
    ("cohere2", "pp=2"),
    ("glm4_moe", "dp=2,ep=2"),
    ("deepseek_v3", "tp=2"),
    ("deepseek_v2", "pp=2"),
    ("qwen3_next", "tp=2"),
    ("qwen3_5", "tp=2"),
    ("bamba", "tp=2,sp=1"),
    ("granitemoehybrid", "dp=2,ep=2"),
    ("falcon_h1", "tp=2"),
    ("olmo_hybrid", "tp=2"),
    ("mamba2", "tp=2"),
    ("nemotron_h", "pp=2"),
]


@pytest.mark.parametrize("name, layout", CASES)
def test_greedy_texts_are_those_of_transformers(name, layout):
    draw = torch.Generator().manual_seed(9)
    given = [
        torch.randint(255, (1 + 2 * i,), generator=draw).tolist() for i in range(16)
    ]
    new = 8
    requests = [
        GenerationRequest(tuple(tokens), Sampling(0.0), new) for tokens in given
    ]
    work = lambda generator, _: generator.run(requests)
    made = at_layout(name, layout, lambda m: led(m.replica, work, requests=8))[0]
    for tokens, text in zip(given, made, strict=True):
        with torch.no_grad():
            expected = theirs(name).generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens)),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        assert [token.token for token in text] == expected[0, len(tokens) :].tolist()


def test_requests_join_leave_and_end_between_steps():
    greedy = lambda tokens, count, **more: GenerationRequest(
        tokens, Sampling(0.0), count, **more
    )
    first, second, third = prompts(3)

    def work(generator, replica):
        (free,) = generator.run([greedy(first, 8)])
        numbers = [
            generator.add(greedy(first, 8)),
            generator.add(greedy(second, 9)),
            generator.add(greedy(third, 3)),
        ]
        events = generator.step()
        generator.cancel(numbers[1])
        while not generator.is_idle:
            events += generator.step()
        assert generator.step() == []
        texts = {n: [t for number, t in events if number == n] for n in numbers}
        assert [len(texts[n]) for n in numbers] == [8, 1, 3]
        assert [t.token for t in texts[numbers[0]]] == [t.token for t in free]
        assert [t.finish for t in texts[numbers[2]]] == [None, None, "length"]
        # A stop token ends a text, and does not come before the least number of tokens.
        stop = free[0].token
        (short,) = generator.run([greedy(first, 8, stop_tokens=frozenset([stop]))])
        assert [(t.token, t.finish) for t in short] == [(stop, "stop")]
        held = greedy(first, 8, stop_tokens=frozenset([stop]), min_new_tokens=4)
        (long,) = generator.run([held])
        assert len(long) > 4 and stop not in [t.token for t in long[:4]]
        return True

    for layout in ("dp=1", "pp=2,dp=2,zero=3"):
        assert on_layout(layout, GPT, work)


def test_what_cannot_run_is_refused_by_name():
    sampling = Sampling()
    wrong = {
        "text has at most": GenerationRequest((1,), sampling, POSITIONS + 1),
        "not in the vocabulary": GenerationRequest((VOCAB + 1,), sampling, 1),
        "exceeds the vocabulary": GenerationRequest(
            (1,), sampling, 1, alternatives=VOCAB + 2
        ),
        "forbids all": GenerationRequest(
            (1,), sampling, 2, 1, stop_tokens=frozenset(range(VOCAB))
        ),
    }

    def work(generator, replica):
        for message, request in wrong.items():
            with pytest.raises(ConfigError, match=message):
                generator.add(request)
        return True

    assert on_layout("dp=1", GPT, work)
    for changes, message in (
        (dict(tokens=()), "has no tokens"),
        (dict(max_new_tokens=0), "generates no text"),
        (dict(min_new_tokens=9), "min_new_tokens=9"),
        (dict(alternatives=-1), "alternatives=-1"),
        (dict(scores_prompt=True), "scores_prompt"),
    ):
        with pytest.raises(ConfigError, match=message):
            GenerationRequest(
                **dict(tokens=(1,), sampling=sampling, max_new_tokens=2) | changes
            )
    with pytest.raises(ConfigError, match="context-parallel-size 2"):
        on_layout("cp=2", GPT, work)


def test_scores_of_long_prompts_are_computed_in_parts(monkeypatch):
    """The probabilities of a vocabulary, in fp64, for all tokens of many prompts would not fit into memory."""
    counts = []

    def counted(logits, picks, most):
        counts.append(len(logits))
        return choice.choose(logits, picks, most)

    whole = on_layout("tp=2", GPT, lambda g, _: texts_of(g, sampled()))
    monkeypatch.setattr(generator_module, "choose", counted)
    monkeypatch.setattr(generator_module, "ROWS", 4)
    parts = on_layout("tp=2", GPT, lambda g, _: texts_of(g, sampled()))
    assert parts == whole and max(counts) == 4


def test_the_score_of_a_prompt_of_one_token_is_that_token():
    def work(generator, replica):
        request = GenerationRequest(
            (3,), Sampling(0.0), 2, alternatives=0, scores_prompt=True
        )
        generator.run([request])
        return generator.prompt_scores(0)

    [score] = on_layout("dp=1", GPT, work)
    assert score.token == 3 and score.log_prob is None


def test_a_prompt_of_all_positions_is_scored_and_has_a_next_token():
    def work(generator, replica):
        whole = GenerationRequest(
            (3,) * POSITIONS, Sampling(0.0), 1, alternatives=0, scores_prompt=True
        )
        (text,) = generator.run([whole])
        return len(text), len(generator.prompt_scores(0))

    assert on_layout("dp=1", GPT, work) == (1, POSITIONS)


def test_scores_of_a_prompt_that_is_cancelled_are_forgotten():
    def work(generator, replica):
        request = GenerationRequest(
            (3, 4), Sampling(0.0), 9, alternatives=0, scores_prompt=True
        )
        number = generator.add(request)
        generator.step()
        generator.cancel(number)
        generator.step()
        with pytest.raises(KeyError):
            generator.prompt_scores(number)
        return True

    assert on_layout("dp=1", GPT, work)


def test_weights_that_are_no_numbers_are_an_error_of_all_ranks():
    def work(generator, replica):
        for parameter in replica.parameters:
            parameter.data.fill_(torch.nan)
        generator.run([GenerationRequest((3,), Sampling(), 2)])

    with pytest.raises(CallError, match="no token can follow the first 1 of a text"):
        on_layout("tp=2", GPT, work)


BAD = 7  # a token whose embedding is infinite, as where fp16 overflows


def infinite_if_bad(self, ids, embed=VocabParallelEmbedding.forward):
    return embed(self, ids).masked_fill((ids.t() == BAD)[..., None], torch.inf)


@pytest.mark.parametrize(
    "layout, job",
    [
        ("dp=1", LLAMA),
        ("tp=2", LLAMA),
        ("pp=2,dp=2", LLAMA),
        ("dp=2,ep=2", EXPERTS),
        ("tp=2", HYBRID),
    ],
)
def test_a_text_without_a_token_ends_alone(layout, job, monkeypatch):
    """Not the prompts beside it, nor the texts that stand in its row of keys later."""
    held = dict(min_new_tokens=6, stop_tokens=frozenset([BAD]), alternatives=0)
    good = [
        GenerationRequest(
            tuple(t for t in p if t != BAD) or (1,), Sampling(0), 6, **held
        )
        for p in prompts()
    ]
    scored = replace(good[0], tokens=(3, BAD, *[5] * 20), scores_prompt=True)
    asked = [scored, *good[:2], replace(scored, tokens=(BAD,)), *good[2:]]

    def work(generator, replica):
        found = {generator.add(request): [] for request in asked}
        while not generator.is_idle:
            for number, token in generator.step():
                found[number].append(token)
        (first,) = found.pop(0)
        (second,) = found.pop(3)
        assert not generator._prompt_scores
        assert "follow the first 22 of a text" in str(first)
        assert "follow the first 1 of a text" in str(second)
        return [[token.token for token in text] for text in found.values()]

    tokens = lambda g, _: [[t.token for t in text] for text in g.run(good)]
    expected = on_layout(layout, job, tokens)
    monkeypatch.setattr(VocabParallelEmbedding, "forward", infinite_if_bad)
    assert on_layout(layout, job, work, requests=3) == expected


def test_a_model_whose_attention_keeps_no_keys_is_refused(monkeypatch):
    """Its texts would be those of a model that sees one token."""

    def forgets(self, x, batch):
        heads = self.heads(self.linear_qkv(x), batch)
        return self.linear_proj(self.core_attention(*heads, batch))

    monkeypatch.setattr(SelfAttention, "forward", forgets)
    with pytest.raises(ConfigError, match="4 layers in which tokens meet, and 0"):
        on_layout("dp=1", GPT, lambda generator, _: texts_of(generator, sampled()))
