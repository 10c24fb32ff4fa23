"""An optimizer whose ranks exchange something else than gradients is one new file: a majority vote of signs
(Bernstein et al. 2018, arXiv:1802.04434, algorithm 3). The expected weights are computed by hand.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from megatron_ds.errors import ConfigError
from megatron_ds.mpu.collectives import all_reduce_
from megatron_ds.mpu.group import DONE
from megatron_ds.mpu.param_spec import DATA_AXES, Init, ParamSpec
from megatron_ds.optim import OptimizerTraits, ParamGroup, default_groups
from megatron_ds.zero.data_groups import DataGroups
from megatron_ds.zero.exchange import FullPrecisionExchange
from megatron_ds.zero.optimizer import ZeroOptimizer
from megatron_ds.zero.settings import STAGES, ZeroSettings
from megatron_ds.zero.update_hook import UpdateHook
from megatron_ds.zero.update_rule import UpdateRule
from tests.harness.gradients import contribute
from tests.harness.threads import run_ranks

SIZES, N, STEPS, RATE = (128, 640, 256), 3, 4, 0.5
PADDED = 1152  # elements: the sum of the sizes as a multiple of 3 shards of 64


class NoExchange(FullPrecisionExchange):
    """Leaves each rank its own gradients."""

    is_off = True

    def sent(self, numel, buckets, ranks, *, sharded):
        return iter(())

    def reduce(self, bucket):
        return DONE


class Vote(UpdateHook):
    """Each element of the gradient becomes the sign that most ranks have."""

    def __init__(self, sets):
        self.sets = sets

    def before_update(self, divisor):
        for s in self.sets:
            votes = s.buckets.flat.sign_()
            all_reduce_(votes, s.store.ranks.data)
            votes.sign_().mul_(divisor)


@dataclass(frozen=True)
class VoteRule(UpdateRule):
    exchange = NoExchange
    keeps_gradients = True

    def check(self, *, gradients_are_split, state_is_split):
        if gradients_are_split or state_is_split:
            raise ConfigError("a vote is about whole gradients. Use --zero-stage 0.")

    def messages(self, layout, parameters, ranks, groups):
        yield "all_reduce", ranks.data, 4 * layout.numel, 1

    def make_hook(self, *, sets, **parts):
        return Vote(sets)


def descend(groups, **options):
    return torch.optim.SGD(groups, lr=1.0)


descend.traits = OptimizerTraits(update_rule=VoteRule())


def gradient(rank, step, i):
    seed = torch.Generator().manual_seed(100 * rank + 10 * step + i)
    return torch.randn(SIZES[i], generator=seed)


def by_hand():
    weights = [torch.zeros(size) for size in SIZES]
    for step in range(STEPS):
        for i, w in enumerate(weights):
            votes = sum(gradient(rank, step, i).sign() for rank in range(N))
            w -= RATE * votes.sign()
    return weights


def train(rank, world):
    parameters = []
    for i, size in enumerate(SIZES):
        parameters.append(nn.Parameter(torch.zeros(size)))
        parameters[-1].spec = ParamSpec(f"p{i}", (size,), Init("zeros"))
    groups = DataGroups({DATA_AXES: world.group("dp-cp", range(N), rank)})
    settings = ZeroSettings(default_groups(descend))
    optimizer = ZeroOptimizer(parameters, settings, groups)
    for step in range(STEPS):
        optimizer.begin_step()
        optimizer.arm()
        for i, p in reversed(list(enumerate(parameters))):
            contribute(p, gradient(rank, step, i))
        optimizer.step(RATE, grad_divisor=N)
    return [p.detach().clone() for p in parameters], optimizer.traffic(1, True, False)


def test_ranks_follow_the_majority():
    for weights, traffic in run_ranks(N, train):
        assert all(map(torch.equal, weights, by_hand()))
        assert traffic == {("all_reduce", "dp-cp"): 4 * PADDED}


def test_settings_ask_the_rule():
    with pytest.raises(ConfigError, match="Use --zero-stage 0"):
        ZeroSettings(default_groups(descend), STAGES[1])


def test_all_groups_of_a_run_have_one_rule():
    plain = ParamGroup("plain", lambda spec: False, torch.optim.SGD)
    with pytest.raises(ConfigError, match="'decay' and 'plain' .* different things"):
        ZeroSettings((*default_groups(descend), plain))
    with pytest.raises(ConfigError, match="'plain' and 'decay' .* different things"):
        ZeroSettings((plain, *default_groups(descend)))
