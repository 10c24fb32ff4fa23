"""One GPU: training there follows training on the CPU, and so does training with state offloaded from it."""

import pytest
import torch

from megatron_ds.config import parse
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tools.compare_layouts import SEQ_LENGTH, VOCAB, tiny_job
from tools.layout_comparison import difference, merge, parse_layout, random_samples, train_layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(),
                                reason="needs a GPU: torch.cuda.is_available() is False")
STEPS, BATCH, LAYERS = 10, 4, 3


def trained(layout, device, dtype="fp32", style="gpt2"):
    request = parse_layout(layout, mbs="2")
    config = parse([*tiny_job(style, dtype, False, 0.1, LAYERS, BATCH, STEPS), *request.flags], world_size=1)
    mesh = Mesh(Grid.fit(1), 0, lambda *args: None, torch.device(device))
    samples = random_samples(4 * BATCH, SEQ_LENGTH, VOCAB, seed=1)
    return merge([train_layout(config, mesh, STEPS, samples, watch=lambda engine: None)]), config.model


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_the_gpu_trains_like_the_cpu(style):
    torch.backends.cuda.matmul.allow_tf32 = False
    (there, model), (here, _) = trained("dp=1", "cuda", style=style), trained("dp=1", "cpu", style=style)
    found = difference(there, here, model)
    assert found.loss < 1e-5, found         # sums are added in another order; dropout falls the same


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("what", ["zero=1,offload=cpu", "zero=2,offload=cpu,ratio=0.5",
                                  "zero=3,offload=cpu,offload_param=cpu"])
def test_offloaded_from_a_gpu_a_run_stays_close_to_one_that_is_not(what, dtype):
    """Close, not equal: the CPU's Adam rounds in another order than the GPU's."""
    (away, model), (stays, _) = trained(f"dp=1,{what}", "cuda", dtype), trained("dp=1,zero=1", "cuda", dtype)
    found = difference(away, stays, model)
    assert found.loss < (1e-5 if dtype == "fp32" else 1e-2), found
