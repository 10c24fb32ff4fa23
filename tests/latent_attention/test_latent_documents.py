"""Multi-latent attention keeps documents of a sample apart, and tokens that fill up a sample change nothing."""

from dataclasses import replace

import pytest
import torch

from megatron_ds.batch.batch import Batch
from megatron_ds.models.specs import specs_of
from tests.harness.gpt_runs import run_gpt
from tests.harness.latent_jobs import YARN, latent_config

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2)]

LENGTHS = 5, 9, 1, 8
FLAGS = {"rope": (), "yarn": (*YARN, "--max-position-embeddings", "64")}


def weights_of(model):
    """Random weights by name, large enough that attention matters."""
    draw = torch.Generator().manual_seed(4)
    found = {}
    for spec in specs_of(model):
        values = torch.randn(spec.shape, generator=draw) * 0.3
        found[spec.name] = values + 1 if len(spec.shape) == 1 else values
    return found


def batch_of(stream: torch.Tensor, lengths, mask=None, apart=True) -> Batch:
    """One row of documents, of tokens stream[:-1] and labels stream[1:]."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.repeat_interleave(torch.tensor(lengths))[None]
    ones = torch.ones(positions.shape)
    return Batch(
        tokens=stream[None, :-1],
        labels=stream[None, 1:],
        loss_mask=ones if mask is None else mask,
        position_ids=positions,
        sample_ids=(0,),
        document_ids=ids if apart else None,
    )


def near(found, expected) -> bool:
    return (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize("tp, sp", [(1, False), (2, False)])
def test_packed_documents_are_each_alone(kind, tp, sp):
    model = latent_config(*FLAGS[kind]).model
    weights = weights_of(model)
    draw = torch.Generator().manual_seed(6)
    stream = torch.randint(model.vocab_size, (sum(LENGTHS) + 1,), generator=draw)
    run = lambda batch: run_gpt(model, weights, batch, tp, sequence_parallel=sp)
    loss, packed, gradients = run(batch_of(stream, LENGTHS))
    logits, totals, sums = [], [], {name: 0 for name in gradients}
    first = 0
    for length in LENGTHS:
        alone = run(batch_of(stream[first : first + length + 1], (length,)))
        logits.append(alone[1])
        totals.append(float(alone[0].total))
        sums = {name: sums[name] + length * g for name, g in alone[2].items()}
        first += length
    assert near(packed, torch.cat(logits, 1))
    assert float(loss.total) == pytest.approx(sum(totals), rel=1e-5)
    for name, gradient in gradients.items():
        assert near(gradient * first, sums[name]), name
    # Joined documents are other texts.
    joined = run(batch_of(stream, LENGTHS, apart=False))
    assert not torch.allclose(joined[1], packed, atol=1e-2)


@pytest.mark.parametrize("kind", FLAGS)
def test_tokens_that_fill_up_a_sample_change_nothing(kind):
    model = latent_config(*FLAGS[kind]).model
    weights = weights_of(model)
    draw = torch.Generator().manual_seed(7)
    stream = torch.randint(model.vocab_size, (13,), generator=draw)
    plain = run_gpt(model, weights, batch_of(stream, (12,), apart=False))
    filled = torch.cat((stream, torch.full((8,), 3)))
    mask = (torch.arange(20) < 12).float()[None]
    batch = batch_of(filled, (20,), mask, apart=False)
    loss, logits, gradients = run_gpt(model, weights, batch)
    assert near(logits[:, :12], plain[1])
    assert float(loss.total) == pytest.approx(float(plain[0].total), rel=1e-5)
    for name, gradient in gradients.items():
        assert near(gradient, plain[2][name]), name
    # Without the mask they would count.
    counted = replace(batch, loss_mask=torch.ones(1, 20))
    assert float(run_gpt(model, weights, counted)[0].total) > 1.2 * float(loss.total)
