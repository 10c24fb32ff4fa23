"""Frozen weights in 8 and 4 bits: their numbers, the model that they are, what they take, and what is refused."""

from statistics import NormalDist

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.errors import ConfigError
from megatron_ds.ops import normal_float
from megatron_ds.ops.normal_float import LEVELS, decode_normal, encode_normal
from megatron_ds.training.run_checkpoint import frozen_pieces
from megatron_ds.zero.number_blocks import FROZEN_BLOCKS
from tests.harness.alive_bytes import AliveBytes
from tests.harness.engines import config_of, on_engines, outcomes
from tests.harness.layout_runs import stray
from tests.harness.tiny_jobs import TOLERANCE, tiny_job
from tests.planning.test_rank_plan import check

pytestmark = [pytest.mark.threads, pytest.mark.one_in(2)]

BLOCK = 64
LORA = "--lora-rank 2 --adam-eps 1e-4".split()
# Rows of 64 numbers on each of two tensor-parallel ranks.
WIDE = "--hidden-size 128 --ffn-hidden-size 128".split()
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 128 --moe-router-dtype fp64".split()


def job_of(style: str, bits: int | None, *words: str, dtype: str = "fp32") -> list[str]:
    job = tiny_job(style, dtype, True, 0.0, 2, 12, 3)
    given = [] if bits is None else ["--lora-base-bits", str(bits)]
    return [*job, *LORA, *words, *given]


# ------------------------------------------------------------------ numbers
def test_levels_are_the_quantiles_of_a_normal_distribution():
    """The table has 8 numbers above 0 and 7 below, of equal shares, and 0, as that of bitsandbytes."""
    outermost = 0.9677083
    quantile = NormalDist().inv_cdf

    def shares(count: int) -> list[float]:
        step = (outermost - 0.5) / count
        return [quantile(outermost - i * step) for i in range(count)]

    numbers = [-x for x in shares(7)] + [0.0] + shares(8)
    expected = [x / max(numbers) for x in sorted(numbers)]
    assert LEVELS == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_number_becomes_the_nearest_level(dtype):
    x = torch.randn(6 * BLOCK, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[BLOCK : 2 * BLOCK] = 0
    codes, scales = encode_normal(x, BLOCK)
    assert (codes.dtype, codes.numel(), scales.numel()) == (torch.uint8, 192, 6)
    table = x.float().view(6, BLOCK)
    assert torch.equal(scales, table.abs().amax(1))
    far = (table[..., None] - torch.tensor(LEVELS) * scales[:, None, None]).abs()
    decoded = decode_normal(codes, scales, BLOCK, torch.empty(6 * BLOCK))
    apart = (decoded.view(6, BLOCK) - table).abs()
    torch.testing.assert_close(apart, far.amin(-1), rtol=0, atol=1e-6)
    # Half of the widest gap, which is that between the two lowest levels.
    assert (apart <= 0.152 * scales[:, None]).all()
    assert decoded[BLOCK : 2 * BLOCK].abs().max() == 0


@pytest.mark.parametrize("at_once", [2 * BLOCK, 1 << 20])
def test_decoding_takes_what_is_planned_and_no_more(at_once, monkeypatch):
    x = torch.randn(6 * BLOCK, generator=torch.Generator().manual_seed(1))
    blocks = FROZEN_BLOCKS[4]
    encoded = blocks.encode(x)
    out = torch.empty(len(x), dtype=torch.bfloat16)
    expected = blocks.decode(encoded, torch.empty(len(x)))
    monkeypatch.setattr(normal_float, "AT_ONCE", at_once)
    with AliveBytes(peak=True) as alive:
        blocks.decode(encoded, out)
    assert alive.peak == blocks.bytes_of_decoding(len(x)) > 0
    assert torch.equal(out, expected.bfloat16())


# ------------------------------------------------------------------ the model
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("layout", ["", "dp=2,zero=3"])
def test_the_model_is_that_of_the_decoded_weights(bits, layout):
    """Not one bit apart; and not the model of the weights before they are encoded."""

    def decode(engine) -> None:
        blocks = FROZEN_BLOCKS[bits]
        for piece in frozen_pieces(engine):
            if piece.spec.matrices is not None:
                numel = piece.tensor.numel()
                padded = torch.zeros(-(-numel // BLOCK) * BLOCK)
                padded[:numel] = piece.tensor
                blocks.decode(blocks.encode(padded), padded)
                piece.tensor.copy_(padded[:numel])
        engine.optimizer.after_load()

    def trained(words, change=lambda engine: None) -> list[float]:
        def of_rank(engine):
            change(engine)
            steps = outcomes(engine, range(3), 1e-2)
            return [step.loss for step in steps]

        return on_engines(config_of(words, layout), of_rank)[0]

    encoded = trained(job_of("llama", bits))
    plain = job_of("llama", None)
    assert encoded == trained(plain, decode)
    assert encoded != trained(plain)


@pytest.mark.parametrize(
    "style, bits, layout, words",
    [
        ("llama", 4, "tp=2,sp=1,pp=2", ["--use-dora"]),
        ("gpt2", 8, "tp=2,dp=2,zero=3", []),
        ("llama", 4, "tp=2,dp=2,ep=2,zero=2", EXPERTS),
    ],
)
def test_tensor_parallel_ranks_have_the_blocks_of_one_process(
    style, bits, layout, words
):
    apart, _ = stray(job_of(style, bits, *WIDE, *words), layout, 3)
    assert apart.is_within(TOLERANCE["fp32"]), apart


# ------------------------------------------------------------------ what it takes
@pytest.mark.parametrize(
    "bits, layout",
    [
        (4, "tp=2,sp=1,pp=2"),
        (8, "dp=2,zero=1"),
        (4, "pp=2,dp=2,zero=2,recompute=full"),
        (4, "tp=2,dp=2,zero=3"),
    ],
)
def test_every_rank_sends_and_holds_what_was_planned(bits, layout):
    check(job_of("llama", bits, *WIDE, dtype="bf16"), layout)


@pytest.mark.parametrize("bits, share", [(8, 8.5 / 16), (4, 4.5 / 16)])
def test_a_frozen_weight_takes_its_bits_and_a_64th_of_a_scale(bits, share):
    def bytes_of(bits: int | None) -> int:
        config = config_of(job_of("llama", bits, *WIDE, dtype="bf16"), "")
        memory = lambda engine: engine.optimizer.memory().parameters
        return on_engines(config, memory)[0]

    h, kv, f = 128, 64, 128
    linear = 2 * (h * (h + 2 * kv) + h * h + 3 * h * f)
    assert bytes_of(None) - bytes_of(bits) == round(2 * linear * (1 - share))


# ------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    "words, problem",
    [
        (["--tensor-model-parallel-size", "2"], "columns of linear_proj"),
        (["--zero-stage", "3", "--offload-param", "cpu"], "--offload-param none"),
        (
            ["--zero-stage", "3", "--zero-quantized-weights"],
            "would place or send otherwise",
        ),
    ],
)
def test_what_cannot_be_encoded_is_refused(words, problem):
    job = [*job_of("llama", 4), "--micro-batch-size", "1"]
    with pytest.raises(ConfigError, match=problem):
        parse([*job, *words], world_size=2)
