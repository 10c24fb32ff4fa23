"""Experts over ranks, each case against one process, with the same rows in every expert. The layout grid has
what they combine with; here are micro-batches, padding, gradients in 16 bits, and experts that overflow or are frozen.

The router computes in fp64, so that rounding does not change a choice; where 16 bits round more than that,
each token passes all experts.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from megatron_ds.extensions.data_efficiency.seqlen_curriculum import truncate
from megatron_ds.models import MODELS, build_stage
from megatron_ds.moe import experts as experts_module
from megatron_ds.moe import mixture
from megatron_ds.tensor_parallel.init import initialize
from tests.harness.bert_runs import random_bert_batch, run_bert
from tests.harness.layout_comparison import (
    difference,
)
from tests.harness.layout_runs import GLOBAL_BATCH, run_layout
from tests.harness.model_runs import context_of
from tests.harness.moe_runs import (
    FEW,
    alone,
    check_equal,
    job_of,
    model_of,
    watched_experts,
)
from tests.harness.tiny_jobs import TOLERANCE

pytestmark = [pytest.mark.threads, pytest.mark.one_in(3)]

ALL_EXPERTS = ["--moe-router-topk", "4"]  # of 4: no choice that rounding may change
DROPS = "--moe-expert-capacity-factor 0.9 --moe-token-drop-policy position".split()


# ------------------------------------------------------------------ micro-batches and samples
INVARIANT = ["--moe-router-load-balancing-type", "seq_aux_loss", *DROPS]
BY_SEQUENCE = (
    "--moe-router-load-balancing-type seq_aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.5 0.5"
).split()
TERMS = ("router z-loss", "seq load balancing loss", "global load balancing loss")


def test_capacity_and_balance_of_sequences_do_not_depend_on_the_micro_batch_size():
    """All tokens count, so that micro-batches of any size have the same weight for each."""
    job = job_of(*INVARIANT, without=("--eod-mask-loss",))
    (one, seen), (four, seen4) = alone(job), alone(job, mbs=4)
    assert difference(four.merged, one.merged, one.model).is_within(TOLERANCE["fp32"])
    assert seen4.loads() == seen.loads() and seen.dropped > 0
    assert 4 * sum(seen4.runs.values()) == sum(seen.runs.values())
    (ours, seen2), _ = check_equal(job, "tp=2,sp=1,dp=2,ep=2,pp=2,mbs=2,recompute=full")
    assert seen2.loads() == seen.loads()
    assert ours.merged[0].losses == pytest.approx(one.merged[0].losses, rel=1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        ["--moe-router-load-balancing-type", "aux_loss", *DROPS],
        [*INVARIANT, "--moe-capacity-scope", "micro-batch"],
    ],
    ids=["balance of micro-batches", "capacity of micro-batches"],
)
def test_those_of_micro_batches_do(flags):
    job = job_of(*flags, without=("--eod-mask-loss",))
    (one, _), (four, _) = alone(job), alone(job, mbs=4)
    assert four.merged[0].losses != pytest.approx(one.merged[0].losses, rel=1e-6)


@pytest.mark.parametrize("mbs", [2, 4])
def test_with_per_token_losses_and_masks_terms_do_not_depend_on_the_micro_batch(mbs):
    """Each sequence weighs as many tokens as it has in the loss, in all terms but that of the micro-batch."""
    job = job_of(
        "--calculate-per-token-loss", "--moe-z-loss-coeff", "0.5", *BY_SEQUENCE
    )
    (one, _), (other, _) = alone(job), alone(job, mbs=mbs)
    assert other.merged[0].losses == pytest.approx(one.merged[0].losses, rel=1e-6)
    assert other.merged[0].grad_norms == pytest.approx(
        one.merged[0].grad_norms, rel=1e-6
    )
    for ours, theirs in zip(other.merged[0].metrics, one.merged[0].metrics):
        for name in TERMS:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6)


# ------------------------------------------------------------------ BERT: padding
@cache
def bert_config(**changes):
    flags = (
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-z-loss-coeff 1e-3 "
        "--moe-expert-capacity-factor 0.8"
    )
    job = job_of(*flags.split(), style="bert")
    at = job.index("--moe-aux-loss-coeff")
    return replace(
        model_of([*job[: at + 1], "0.02", "0.03", *job[at + 2 :]]), **changes
    )


def bert_run(batch, **options):
    """(objective, {name: mean} of the ledger, gradients, rows of experts)."""
    config = bert_config()
    model = build_stage(MODELS["bert"](config, context_of()))
    initialize(model.parameters(), 5, {})
    weights = {
        p.spec.name: p.detach()[: p.spec.shape[0]].double()
        for p in dict.fromkeys(model.parameters())
    }
    with watched_experts() as seen:
        loss, _, gradients = run_bert(config, weights, batch, **options)
    means = {}
    for entry in loss.entries:
        value, count = means.get(entry.name, (0.0, 0.0))
        means[entry.name] = (
            value + float(entry.value.detach()),
            count + float(entry.count),
        )
    means = {name: value / count for name, (value, count) in means.items()}
    return loss.objective.item(), means, gradients, seen


@pytest.mark.parametrize(
    "layout", [dict(tp_size=1), dict(tp_size=2, sequence_parallel=True)], ids=str
)
def test_padding_changes_neither_losses_nor_gradients_nor_rows(layout):
    """Three samples of different lengths: whatever the padding holds, all the same; without it, each sample
    has the rows that it has by itself."""
    batch = random_bert_batch(131, (3, 4, 5), 12)
    padding = batch.padding
    assert 0 < padding.sum() and padding.sum(1).unique().numel() > 1
    noise = torch.randint(
        131, batch.tokens.shape, generator=torch.Generator().manual_seed(9)
    )
    other = replace(batch, tokens=batch.tokens.where(~padding, noise))
    assert not torch.equal(batch.tokens, other.tokens)
    loss, means, gradients, seen = bert_run(batch, **layout)
    loss2, means2, gradients2, seen2 = bert_run(other, **layout)
    assert loss2 == loss and seen2.loads() == seen.loads() and seen.dropped > 0
    terms = [name for name in means if not name.startswith("encoder.")]
    assert {name: means2[name] for name in terms} == {
        name: means[name] for name in terms
    }
    for name, gradient in gradients.items():
        if "word_embeddings" not in name:
            assert torch.equal(gradients2[name], gradient), name
    assert {
        "load balancing loss",
        "seq load balancing loss",
        "router z-loss",
        "sop loss",
    } <= means.keys()
    for i, sample in enumerate(batch.sample_ids):
        length = int((~padding[i]).sum())
        *_, short = bert_run(truncate(batch.split(1)[i], length), tp_size=1)
        for (layer, _), rows in short.kept.items():
            assert rows.tolist() == seen.kept[layer, sample].tolist()
            assert int(short.chosen[layer, sample].sum()) == 2 * length


# ------------------------------------------------------------------ precision
def test_sixteen_bit_gradients_stray_no_further_than_sixteen_bits_may():
    job = job_of(*ALL_EXPERTS, *DROPS, dtype="bf16")
    for layout in (
        "dp=2,tp=2,pp=2,ep=2,zero=3,grads=bf16",
        "dp=4,ep=2,zero=2,comm=bf16",
    ):
        (run, _), _ = check_equal(job, layout, dtype="bf16")
        assert run.seen[0].dtypes == {torch.bfloat16}


# ------------------------------------------------------------------ one expert that overflows, or is frozen
def overflowing(patch, expert, step, num_experts=4):
    """In one step, let the gradient of the first weight of one expert of layer 1 be infinite, where it is."""
    forward, begin, where, poisoned = (
        mixture.MixtureOfExperts.forward,
        experts_module._begin_dw,
        {},
        [],
    )

    def watched_forward(self, x, batch):
        first, local = (
            expert - self.groups.ep.rank * (num_experts // self.groups.ep.size),
            self.experts,
        )
        if (
            self.name.endswith(".1.mlp")
            and 0 <= first < num_experts // self.groups.ep.size
        ):
            where[id(local.linear_fc1.weight)] = (
                first,
                max(batch.sample_ids) // GLOBAL_BATCH,
            )
        return forward(self, x, batch)

    def watched_begin(weight, x, dy, runs):
        at, now = where.get(id(weight), (None, None))
        if now == step and runs.counts[at]:
            start = sum(runs.counts[:at])
            dy = dy.clone()
            dy[start : start + runs.counts[at]] = torch.inf
            poisoned.append(at)
        return begin(weight, x, dy, runs)

    patch.setattr(mixture.MixtureOfExperts, "forward", watched_forward)
    patch.setattr(experts_module, "_begin_dw", watched_begin)
    return poisoned


@pytest.mark.parametrize(
    "layout", ["dp=2,ep=2,pp=2,zero=0", "dp=4,ep=2,zero=2", "dp=2,ep=2,tp=2,zero=3"]
)
def test_where_one_expert_overflows_all_ranks_skip_the_step(layout):
    job = job_of(*ALL_EXPERTS, "--hysteresis", "1", dtype="fp16", style="gpt2")
    at = job.index("--initial-loss-scale")
    job[at + 1] = "1024"
    with pytest.MonkeyPatch.context() as patch:
        poisoned = overflowing(patch, expert=3, step=2)
        one = run_layout(job, "mbs=1", FEW)
        assert poisoned
        poisoned.clear()
        ours = run_layout(job, layout, FEW)
        assert poisoned
    finite = [
        [torch.isfinite(torch.tensor(norm)).item() for norm in run.merged[0].grad_norms]
        for run in (one, ours)
    ]
    assert finite == [[True, True, False, True, True]] * 2
    assert difference(ours.merged, one.merged, ours.model).is_within(TOLERANCE["fp16"])


@pytest.mark.parametrize("layout", ["dp=2,ep=2,tp=2,zero=0", "dp=4,ep=2,zero=3"])
def test_frozen_experts_stay_and_the_rest_trains_like_in_one_process(
    layout, monkeypatch
):
    make = experts_module.GroupedLinear.__init__

    def frozen(self, name, *args, **kwargs):
        make(self, name, *args, **kwargs)
        if "layers.0" in name:
            self.weight.requires_grad_(False)

    monkeypatch.setattr(experts_module.GroupedLinear, "__init__", frozen)
    job = job_of("--seed", "77")
    (run, _), (reference, _) = check_equal(job, layout)
    first = run_layout(job, "mbs=1", 0).merged[1]
    for name, w in run.merged[1].items():
        is_frozen = "layers.0" in name and ".experts." in name
        assert torch.equal(w, first[name]) == is_frozen, name
