"""A run with OneCycle updates with the numbers of DeepSpeed's class, also after a resume."""

import contextlib
import re

import pytest

from megatron_ds.zero.optimizer import ZeroOptimizer
from tests.harness.deepspeed_schedulers import rates_of
from tests.harness.pretraining import MOCK, records, same_bits, saved_state, train

pytestmark = pytest.mark.processes

PARAMS = dict(
    cycle_min_lr=1e-4,
    cycle_max_lr=1e-3,
    cycle_first_step_size=2,
    cycle_second_step_size=1,
    cycle_min_mom=0.5,
    decay_step_size=1,
    decay_lr_rate=0.5,
)
FLAGS = [
    *MOCK,
    *"--lr-warmup-iters 0 --lr-decay-style OneCycle --adam-beta2 0.95".split(),
    *(word for name, value in PARAMS.items() for word in (f"--{name}", str(value))),
]


@contextlib.contextmanager
def saying_betas(rank):
    """Prints the betas of each update."""
    update = ZeroOptimizer.update

    def saying(self, *args):
        groups = [
            group
            for optimizer in self.resident._optimizers
            for group in optimizer.param_groups
        ]
        print("betas", *{group["betas"] for group in groups})
        return update(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ZeroOptimizer, "update", saying)
        yield


def test_a_resumed_cycle_goes_on_with_deepspeeds_numbers(tmp_path):
    (whole,) = train(1, [*FLAGS, "--save", tmp_path / "whole"], spoil=saying_betas)
    train(1, [*FLAGS, "--save", tmp_path / "first", "--exit-interval", "3"])
    (rest,) = train(
        1,
        [*FLAGS, "--load", tmp_path / "first", "--save", tmp_path / "first"],
        spoil=saying_betas,
    )
    expected = rates_of("OneCycle", 1.0, 6, PARAMS)
    betas = [
        tuple(map(float, pair))
        for pair in re.findall(r"betas \((\S+), (\S+)\)", whole.out)
    ]
    assert betas == [(pytest.approx(beta1), 0.95) for _, beta1 in expected]
    rates = [record["learning_rate"] for record in records(tmp_path / "first")]
    assert rates == pytest.approx([lr for lr, _ in expected])
    assert re.findall("betas .*", rest.out) == re.findall("betas .*", whole.out)[3:]
    assert same_bits(
        saved_state(tmp_path / "first", 6), saved_state(tmp_path / "whole", 6)
    )
