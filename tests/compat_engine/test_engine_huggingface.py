"""An engine trains a Hugging Face model as it comes, and what it writes `from_pretrained` reads."""

import pytest
import torch

import megatron_ds
from megatron_ds.compat.engine import from_safetensors
from megatron_ds.mpu.grid import Grid
from megatron_ds.mpu.mesh import Mesh
from tests.harness.plain_training import train_plainly
from tests.harness.threads import run_ranks

pytestmark = pytest.mark.threads

transformers = pytest.importorskip(
    "transformers", reason="trains a model of transformers, which is not installed"
)

STEPS, SAMPLES, LENGTH = 3, 6, 9


def make(recompute=False):
    torch.manual_seed(5)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=41,
            n_positions=LENGTH,
            n_embd=24,
            n_layer=3,
            n_head=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
    )
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def batches(ranks):
    generator = torch.Generator().manual_seed(1)
    return [
        list(torch.randint(41, (SAMPLES, LENGTH), generator=generator).chunk(ranks))
        for _ in range(STEPS)
    ]


def config_of(stage, **more):
    params = {"lr": 2e-3, "weight_decay": 0.1, "eps": 1e-6}
    return {
        "train_batch_size": SAMPLES,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": stage},
        **more,
    }


def train(engine, rank, ranks):
    norms = []
    for microbatches in batches(ranks):
        loss = loss_of(engine, microbatches[rank])
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


@pytest.mark.parametrize(
    "stage, ranks, recompute",
    [(0, 1, False), (1, 2, False), (2, 2, False), (3, 2, False), (3, 2, True)],
)
def test_gpt2_trains_as_with_torch_alone(stage, ranks, recompute, tmp_path):
    models = [make(recompute) for _ in range(ranks)]

    def main(rank, world):
        engine, *_ = megatron_ds.initialize(
            model=models[rank],
            config=config_of(stage),
            mpu=Mesh(Grid.fit(ranks), rank, world.connect),
        )
        norms = train(engine, rank, ranks)
        engine.save_safetensors(tmp_path, max_shard_bytes=30_000)
        return norms

    plain = make()
    expected = train_plainly(
        plain, loss_of, batches(ranks), lr=2e-3, clip=1.0, weight_decay=0.1, eps=1e-6
    )
    assert min(expected) > 1, "clipping is in force"
    for norms in run_ranks(ranks, main):
        assert norms == pytest.approx(expected, rel=1e-5)
    plain.config.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(
            again.get_parameter(name).detach(), p.detach(), rtol=1e-5, atol=2e-6
        )
    assert again.lm_head.weight is again.transformer.wte.weight


def test_a_pretrained_model_is_read_into_shards(tmp_path):
    saved = make()
    saved.save_pretrained(tmp_path)
    stored = from_safetensors(tmp_path)

    def main(rank, world):
        with torch.device("meta"):
            model = transformers.GPT2LMHeadModel(saved.config)
        model.tie_weights()
        engine, *_ = megatron_ds.initialize(
            model=model,
            config=config_of(3),
            mpu=Mesh(Grid.fit(2), rank, world.connect),
            draw=stored,
        )
        return engine.full_state_dict()

    state = run_ranks(2, main)[0]
    assert state.keys() == saved.state_dict().keys()
    assert all(
        torch.equal(state[name], value) for name, value in saved.state_dict().items()
    )
