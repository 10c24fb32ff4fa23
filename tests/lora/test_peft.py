"""Adapters against peft's: the same values in the same model, trained by the same steps."""

import pytest
import torch

from megatron_ds.compat.conversion.files.stored_tensor import StoredTensor
from megatron_ds.compat.conversion.filling import fill, plan_filling
from megatron_ds.compat.conversion.foreign_start import load_foreign
from megatron_ds.compat.conversion.formats import Wishes, format_of
from megatron_ds.compat.conversion.huggingface.huggingface_families import FAMILIES
from megatron_ds.compat.conversion.huggingface.peft_adapter import (
    PREFIX,
    check_config,
    from_peft,
    targets_of,
    to_peft,
)
from megatron_ds.config import parse
from megatron_ds.errors import CheckpointError
from megatron_ds.mpu.mesh import Mesh
from megatron_ds.training.run_checkpoint import all_pieces, frozen_pieces
from tests.harness.huggingface_models import V, saved
from tests.harness.layout_comparison import (
    DOCUMENT_ENDS,
    merge,
    parse_layout,
    random_samples,
    train_layout,
)
from tests.harness.next_step import flags_of
from tests.harness.threads import run_ranks

pytestmark = [pytest.mark.threads, pytest.mark.parts(2)]

RANK, ALPHA, STEPS, BATCH, RATE = 3, 6, 10, 4, 1e-2
ADAM = {"betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01}
FLAGS = (
    f"--lora-rank {RANK} --lora-alpha {ALPHA} --lr {RATE} --min-lr {RATE} --clip-grad 0 --adam-beta2 0.95 "
    "--adam-eps 1e-6 --weight-decay 0.01 --seq-length 16 --hidden-dropout 0 --attention-dropout 0"
).split()
# model → modules with adapters, layout
CASES = {
    "llama": ("q_proj v_proj o_proj gate_proj down_proj", "tp=2,sp=1"),
    "qwen3, tied": ("q_proj k_proj v_proj up_proj", "pp=2,zero=1"),
    "gpt2": ("c_attn c_proj c_fc", "dp=2,zero=3"),
    "mixtral": ("k_proj o_proj", "tp=2"),
}


def peft_of(folder, modules: str):
    """A model with adapters, none of which is 0."""
    import peft
    import transformers

    torch.manual_seed(3)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(folder),
        peft.LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=modules.split(),
            fan_in_fan_out="c_attn" in modules,
        ),
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def values_of(model) -> dict[str, torch.Tensor]:
    """The adapters, as peft names them in a file."""
    return {
        name.replace(".default", ""): value.detach().clone()
        for name, value in model.named_parameters()
        if "lora_" in name
    }


def peft_trains(model, samples) -> list[float]:
    """The losses of the steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, **ADAM)
    losses = []
    for step in range(STEPS):
        rows = samples[step * BATCH : (step + 1) * BATCH]
        logits = model(input_ids=rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def stored(tensors: dict[str, torch.Tensor]) -> dict:
    return {
        "weight": {
            name: StoredTensor(tuple(t.shape), t.dtype, lambda t=t: t, name)
            for name, t in tensors.items()
        }
    }


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_peft(name, tmp_path):
    modules, layout = CASES[name]
    folder = saved(name, tmp_path)
    theirs = peft_of(folder, modules)
    samples = random_samples(STEPS * BATCH, 16, V, seed=5)
    samples = samples.where(samples % DOCUMENT_ENDS != 0, V - 1)  # as a run reads them
    found = format_of("huggingface").read(folder, Wishes())
    family = FAMILIES[theirs.config.model_type]
    # The run's layers are named by the modules, and its adapters have their values.
    request = parse_layout(layout, mbs="2")
    flags = [*flags_of(found.model), *FLAGS, *request.flags]
    model = parse(flags, world_size=request.world_size).model
    ours = from_peft(values_of(theirs), family, model)
    targets = targets_of(ours)
    config = parse(
        [*flags, "--lora-target-modules", *targets], world_size=request.world_size
    )

    def load(engine):
        load_foreign(engine, found, frozen_pieces(engine), engine.config.checkpoint)
        pieces = all_pieces(engine)
        fill(plan_filling(pieces, stored(ours), ("weight",)), engine.mesh.coordinates)
        engine.optimizer.after_load()

    def rank_trains(rank, world):
        mesh = Mesh(config.grid(), rank, world.connect, torch.device("cpu"))
        return train_layout(config, mesh, STEPS, samples, watch=load)

    trace, weights = merge(run_ranks(request.world_size, rank_trains))
    assert trace.losses == pytest.approx(peft_trains(theirs, samples), rel=1e-5)
    after = to_peft({n: w for n, w in weights.items() if ".lora_" in n}, family, model)
    expected = values_of(theirs)
    assert after.keys() == expected.keys()
    for key, value in expected.items():
        apart = (after[key] - value).norm() / value.norm()
        assert apart < 1e-5, (key, float(apart))
    assert all(key.startswith(PREFIX) for key in after)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"layer_replication": [[0, 2]]},
        {"alora_invocation_tokens": [1, 2]},
    ],
)
def test_adapters_that_are_computed_otherwise_are_refused(settings):
    check_config({"init_lora_weights": True, "layer_replication": None}, "here")
    with pytest.raises(CheckpointError, match=next(iter(settings))):
        check_config(settings, "here")


def test_half_an_adapter_is_refused(tmp_path):
    folder = saved("llama", tmp_path)
    found = format_of("huggingface").read(folder, Wishes())
    values = values_of(peft_of(folder, "q_proj v_proj"))
    values.pop(next(name for name in values if "q_proj.lora_B" in name))
    model = parse([*flags_of(found.model), *FLAGS, "--micro-batch-size", "1"]).model
    with pytest.raises(CheckpointError, match="one matrix of two"):
        from_peft(values, FAMILIES["llama"], model)
