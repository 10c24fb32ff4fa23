"""How many operations a layer with experts, and the report of a step, dispatch: on a GPU each is a launch."""

from collections import Counter

import pytest
import torch

from megatron_ds.batch.ledger import Ledger
from megatron_ds.host.device_copies import column
from megatron_ds.models import MODELS
from megatron_ds.moe.mixture import MixtureOfExperts
from megatron_ds.ops import grouped
from tests.harness.aten_calls import Counted
from tests.harness.model_runs import context_of
from tests.harness.moe_runs import model_of
from tests.harness.tiny_jobs import SEQ_LENGTH, tiny_job

pytestmark = pytest.mark.plan

H, SAMPLES = 32, 2
CPU = torch.device("cpu")
VIEWS = (
    "view",
    "t",
    "transpose",
    "expand",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "split",
    "split_with_sizes",
    "unbind",
    "permute",
    "_unsafe_view",
)


def calls_of_layer(experts: int, *flags: str) -> Counter:
    """Of a forward and a backward, with the second micro-batch: the first allocates."""
    job = [
        *tiny_job("llama", "fp32", True, 0.0, 2, SAMPLES, 1),
        *f"--num-experts {experts} --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 1e-3".split(),
        *flags,
    ]
    mlp = MixtureOfExperts(model_of(job), experts, "mlp", context_of(), output_std=0.1)
    torch.manual_seed(3)
    for p in mlp.parameters():
        torch.nn.init.normal_(p, std=0.2)
    for _ in range(2):
        ledger, x = Ledger(), torch.randn(SEQ_LENGTH, SAMPLES, H).requires_grad_()
        with Counted() as counted:
            y = mlp(
                x, MODELS["gpt"].data.blank(SAMPLES, SEQ_LENGTH).with_ledger(ledger)
            )
            terms = [
                (e.value, torch.full_like(e.value, e.weight))
                for e in ledger.take()
                if e.weight
            ]
            torch.autograd.backward(*zip((y, torch.ones_like(y)), *terms))
    return counted.calls


@pytest.fixture
def kernel(monkeypatch):
    """torch's grouped products, which compute on CPUs too."""
    monkeypatch.setattr(grouped, "_has_kernel", lambda x, weight: len(x) > 0)


@pytest.mark.parametrize(
    "flags, most",
    [
        ([], 120),
        (
            ["--moe-expert-capacity-factor", "1", "--moe-pad-expert-input-to-capacity"],
            168,
        ),
    ],
    ids=str,
)
def test_a_layer_dispatches_few_operations_and_not_more_for_more_experts(
    flags, most, kernel
):
    """`most` operations besides views: 117 and 165 with torch 2.13."""
    four, sixteen = (calls_of_layer(n, *flags) for n in (4, 16))
    assert four == sixteen and four["_grouped_mm"] == 6
    assert four["cumsum"] == 1, "offsets are made once"
    assert sum(n for name, n in four.items() if name not in VIEWS) <= most


def test_the_numbers_of_a_step_are_collected_exactly_in_few_operations():
    third = torch.tensor(1 / 3, dtype=torch.float64)
    scalars = [torch.tensor(0.1), torch.tensor((1 << 25) + 1), 3, third, 0.5]
    assert column(scalars, CPU).tolist() == [
        torch.tensor(0.1).item(),
        (1 << 25) + 1,
        3,
        1 / 3,
        0.5,
    ]
    assert column([1, 2.5], CPU).tolist() == [1, 2.5] and column([], CPU).tolist() == []
    counts = []
    for times in (1, 50):
        with Counted() as counted:
            column(scalars * times, CPU)
        counts.append(sum(n for name, n in counted.calls.items() if name not in VIEWS))
    assert counts[0] == counts[1]
