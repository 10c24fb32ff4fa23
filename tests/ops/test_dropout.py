import numpy as np
import pytest
import torch

from megatron_ds.ops import dropout as user
from megatron_ds.ops import keep_tables as module
from megatron_ds.ops.dropout import KeepMask, dropout, sample_keys
from megatron_ds.ops.keep_tables import keep_masks, keep_scale

pytestmark = pytest.mark.plan

KEY = (1234, "decoder.layers.3.mlp", 17)


def keep_mask(p, key, rows, cols):
    return keep_masks(p, [key], rows, cols)[0]


@pytest.fixture(params=["numpy", "device"])
def generator(request, monkeypatch):
    """Both ways of drawing: NumPy's, and the elementwise operations of other devices, which run on a CPU
    too."""
    if request.param == "device":
        for file in (module, user):
            monkeypatch.setattr(file, "draw_keep_masks_", draw_on_device)


def draw_on_device(out, p, keys, rows):
    module.draw_on_device_(out, module.threshold_of(p), keys, rows)


@pytest.mark.parametrize("rows", [range(0, 9), range(5, 6), range(1000, 1070)])
@pytest.mark.parametrize("cols", [1, 15, 16, 33, 130])
@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.9])
def test_other_devices_draw_the_bits_of_the_cpu(p, cols, rows, monkeypatch):
    monkeypatch.setattr(
        module, "COUNTERS_AT_ONCE", 40
    )  # several blocks, the last one short
    keys = [
        (seed, "site", sample, head)
        for seed in (1, 2**40)
        for sample in (0, 7)
        for head in range(3)
    ]
    here, there = (
        torch.empty(len(keys), len(rows), cols, dtype=torch.bool) for _ in range(2)
    )
    module.draw_keep_masks_(here, p, keys, rows)
    draw_on_device(there, p, keys, rows)
    assert torch.equal(here, there)


def test_philox_is_numpys():
    keys, counters = [0, 1, 2**62 + 3], torch.tensor([1, 2, 3, 2**40])
    words = module.philox(counters, torch.tensor(keys)[:, None])
    for key, of_key in zip(keys, words):
        for counter, of_counter in zip(counters.tolist(), of_key):
            expected = np.random.Philox(key=key, counter=counter - 1).random_raw(4)
            assert of_counter.numpy().view(np.uint64).tolist() == expected.tolist()


def test_a_mask_takes_a_number_of_operations_that_does_not_grow_with_samples_and_heads():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            self.count += 1
            return operation(*args, **kwargs or {})

    def operations(keys):
        with Counted() as counted:
            draw_on_device(
                torch.empty(keys, 8, 64, dtype=torch.bool),
                0.1,
                [("site", k) for k in range(keys)],
                range(8),
            )
        return counted.count

    assert operations(1) == operations(64)


@pytest.mark.parametrize("cols", [1, 7, 16, 385])
def test_any_slice_of_rows_equals_the_slice_of_the_whole_mask(generator, cols):
    whole = keep_mask(0.3, KEY, range(0, 200), cols)
    for start, stop in ((0, 1), (63, 65), (64, 128), (101, 200), (5, 5)):
        assert torch.equal(
            keep_mask(0.3, KEY, range(start, stop), cols), whole[start:stop]
        )


def test_every_part_of_the_key_changes_the_mask(generator):
    keys = [
        KEY,
        (1235, *KEY[1:]),
        (KEY[0], "decoder.layers.4.mlp", KEY[2]),
        (*KEY[:2], 18),
        (*KEY, 0),
        (*KEY, 1),
    ]
    masks = [keep_mask(0.5, key, range(8), 64).flatten().tolist() for key in keys]
    assert len({tuple(mask) for mask in masks}) == len(keys)
    assert masks[0] == keep_mask(0.5, KEY, range(8), 64).flatten().tolist()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_kept_share_and_the_mean_are_right(generator, p):
    mask = keep_mask(p, KEY, range(500), 400)
    share = mask.float().mean().item()
    assert (
        abs(share - (1 - p)) < 5 * (p * (1 - p) / mask.numel()) ** 0.5
    )  # five standard deviations
    # columns are independent
    assert abs(mask.float().mean(0).std().item() - (p * (1 - p) / 500) ** 0.5) < 0.005
    assert abs(keep_scale(p) * (1 - p) - 1) < 1e-4


def test_a_sequence_slice_and_a_single_sample_see_the_mask_of_the_whole_batch(
    generator,
):
    x = torch.randn(10, 3, 7)
    arguments = dict(seed=5, site="embedding")
    whole = dropout(x, 0.4, sample_ids=(9, 2, 5), rows=range(10), **arguments)
    lower = dropout(x[5:], 0.4, sample_ids=(9, 2, 5), rows=range(5, 10), **arguments)
    alone = dropout(x[:, 1:2], 0.4, sample_ids=(2,), rows=range(10), **arguments)
    assert torch.equal(lower, whole[5:]) and torch.equal(alone, whole[:, 1:2])
    assert not torch.equal(whole[:, 0] == 0, whole[:, 1] == 0)


def test_elements_and_gradients_are_zero_or_scaled_alike():
    x = torch.randn(6, 2, 9, requires_grad=True)
    y = dropout(x, 0.25, seed=1, site="a", sample_ids=(0, 1), rows=range(6))
    y.backward(torch.ones_like(y))
    kept = y != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(y, torch.where(kept, x * (1 / 0.75), 0.0))
    torch.testing.assert_close(x.grad, kept * (1 / 0.75))


def test_the_dtype_stays():
    x = torch.randn(6, 2, 9, dtype=torch.bfloat16)
    assert (
        dropout(x, 0.25, seed=1, site="a", sample_ids=(0, 1), rows=range(6)).dtype
        == torch.bfloat16
    )


def test_probability_zero_returns_its_input():
    x = torch.randn(6, 2, 9)
    assert dropout(x, 0.0, seed=1, site="a", sample_ids=(0, 1), rows=range(6)) is x


def test_attention_masks_are_keyed_by_the_global_head(generator):
    keys = sample_keys(3, "layer", (4, 8))
    whole = KeepMask(0.5, keys, heads=range(0, 6), rows=range(5), cols=5).mask
    upper = KeepMask(0.5, keys, heads=range(4, 6), rows=range(5), cols=5).mask
    assert torch.equal(upper, whole[:, 4:])
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_no_global_generator_is_touched(generator):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    keep_mask(0.3, KEY, range(100), 33)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mask_is_the_same_in_every_release():
    # A resumed run must go on with the masks it began with: these bits may not change without a note in the
    # changelog.
    mask = keep_mask(0.5, (1, "site", 2), range(3, 5), 20)
    assert ["".join("01"[int(bit)] for bit in row) for row in mask] == GOLDEN


GOLDEN = ["01111111011011001110", "11000001001101111111"]
