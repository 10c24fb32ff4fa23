"""One bit an element: signs in bytes, DeepSpeed's golden values, the order of exchanges."""

import numpy as np
import pytest
import torch

from megatron_ds.extensions.onebit.phases import Exchange, FrozenVariance, ZeroOnePhases
from megatron_ds.extensions.onebit.signs import pack_signs, unpack_signs
from megatron_ds.extensions.onebit.switched_exchange import NoiseShare
from tests.harness.onebit_simulator import SimulatedMean

pytestmark = pytest.mark.plan

X0 = torch.tensor([1.0, -2, 3, -4, 5, -6, 7, -8, 0, 1, -1, 2, -2, 3, -3, 4])
X1 = torch.tensor([-1.0, 1, 2, 2, -3, -3, 4, 4, -5, -5, 6, 6, -7, -7, 8, 8])


def test_signs_are_packed_as_numpy_packs_bits():
    y = torch.randn(1024, generator=torch.Generator().manual_seed(1))
    y[[3, 100]], y[101] = 0.0, -0.0
    packed = pack_signs(y)
    assert np.array_equal(packed.numpy(), np.packbits((y >= 0).numpy()))
    assert torch.equal(unpack_signs(packed), torch.where(y >= 0, 1.0, -1.0))


def test_the_oracle_has_the_golden_values_of_deepspeeds_compressed_all_reduce():
    """There each of the two servers has a scale of its own."""
    mean = SimulatedMean((16,), 2, chunks=2)
    out = mean([X0, X1])
    assert pack_signs(X0).tolist() == [170, 213] and pack_signs(X1).tolist() == [
        115,
        51,
    ]
    assert [float(s) for s in mean.scales] == pytest.approx(
        [3.937, 5.04975, 2.78655, 2.78655], rel=1e-5
    )
    assert pack_signs(out).tolist() == [115, 51]
    assert out.abs().tolist() == pytest.approx([2.78655] * 16, rel=1e-5)
    y0, y1 = (x + error for x, error in zip((X0, X1), mean.worker_errors))
    out = mean([X0, X1])
    assert pack_signs(y0).tolist() == [42, 53] and pack_signs(y1).tolist() == [131, 51]
    assert [float(s) for s in mean.scales] == pytest.approx(
        [5.1302, 6.05016, 5.52118, 4.99844], rel=1e-5
    )
    assert pack_signs(out).tolist() == [170, 53]
    assert mean.worker_errors[0][:4].tolist() == pytest.approx(
        [3.1932, 5.0672, -3.0672, 1.0672], rel=1e-4
    )
    assert mean.server_error[:8].tolist() == pytest.approx(
        [-2.831, -2.2992, -4.2743, -2.2992, -3.751, -1.7758, 1.7758, 3.751], rel=1e-4
    )


def test_1_bit_adam_exchanges_momentum_after_the_freeze():
    phases = FrozenVariance(3)
    assert [phases.at(t) for t in (1, 3, 4, 9)] == [Exchange.FULL] * 2 + [
        Exchange.MOMENTUM
    ] * 2
    assert [phases.variance_updates(t) for t in (1, 3, 9)] == [1, 3, 3]


def test_refreshes_of_0_1_adam_become_rarer_as_in_deepspeed():
    """From the multiples of each interval; there the first refresh is one step later, as a batch is lost."""
    of = lambda scaler, stop: [
        t
        for t in range(1, stop)
        if ZeroOnePhases(10**6, scaler, 1, 1).at(t) is Exchange.FULL
    ]
    assert of(2, 100) == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96]
    every = of(16, 1001)
    assert len(every) == 96 and every[-6:] == [832, 864, 896, 928, 960, 992]
    assert ZeroOnePhases(10**6, 16, 1, 1).variance_updates(1000) == 96


def test_intervals_between_exchanges_of_0_1_adam_double_up_to_the_clipper():
    phases = ZeroOnePhases(10, 2, 4, 8)
    after = {t: phases.at(t) for t in range(11, 60)}
    sums = {t for t, exchange in after.items() if exchange is Exchange.SUM}
    assert sums == {11, 12, 13, 14, 16, 18, 20, 24, 32, 40, 48, 56}
    assert set(after.values()) == {Exchange.SUM, Exchange.NONE}
    assert phases.at(9) is phases.at(10) is Exchange.GRADIENT


def test_the_share_of_noise_is_that_of_the_global_batch_on_any_number_of_ranks():
    """‖G‖² = 3, noise of variance 8 in a global batch: the mean over 2 or 4 ranks of ‖g_i‖² is 3 + 8 P."""
    shares = []
    for ranks in (2, 4):
        shares.append(NoiseShare())
        for _ in range(3):
            shares[-1].add((3 + 8 * ranks) / (3 + 8), ranks)
        assert shares[-1].ratio(ranks) == pytest.approx(((3 + 8 * ranks) / 11) ** 0.5)
    assert [share.value for share in shares] == pytest.approx([8 / 11] * 2)
    assert NoiseShare().ratio(8) == 1.0
