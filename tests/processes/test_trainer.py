"""The Trainer of transformers, by accelerate, on the engine under the name `deepspeed`, with two ranks.

The references are losses of the same program under DeepSpeed 0.19.8 (DS_ACCELERATOR=cpu, transformers 5.24,
accelerate 1.15), rounded to 6 digits; they are the same at stages 0 to 3 there.
"""

import importlib.util
import json
import os
import subprocess

import pytest

from tests.harness.documents import blocks_of
from tests.harness.warm import warm_environment

pytestmark = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None,
                                reason="accelerate is not installed")
DEEPSPEED = {"plain": [3.951859, 3.608475, 3.363111, 3.205287, 2.996307, 3.094593]}
PROGRAM = '''
import json, sys, warnings
warnings.filterwarnings("ignore")
import megatron_ds
megatron_ds.install_as_deepspeed()

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from accelerate.state import AcceleratorState

AUTO = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
TOKENS = [torch.arange(i, i + 16) % 50 for i in range(32)]
DATA = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
SIZES = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)


def trained(out, stage, bf16=False, recompute=False, freeze=False, own_optimizer=False, accumulation=1,
            offload=False, save=False, resume=None):
    AcceleratorState._reset_state(True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    if freeze:                                          # a base that is frozen, as below adapters
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj.requires_grad_(True)
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
              "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_optimization": zero,
              "bf16": {"enabled": "auto"}} | ({} if own_optimizer else {"optimizer": AUTO})
    arguments = TrainingArguments(
        out, per_device_train_batch_size=2, max_steps=6, learning_rate=1e-2, weight_decay=0.01,
        deepspeed=config, report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, bf16=bf16,
        gradient_checkpointing=recompute, gradient_accumulation_steps=accumulation,
        save_strategy="steps" if save else "no", save_steps=3)
    trainer = Trainer(model=model, args=arguments, train_dataset=DATA)
    trainer.train(resume_from_checkpoint=resume)
    assert type(trainer.model_wrapped).__module__ == "megatron_ds.engine.engine"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


found = {name: trained(f"{sys.argv[1]}/{name}", **options)
         for name, options in json.loads(sys.argv[2]).items()}
found["resumed"] = trained(f"{sys.argv[1]}/again", 2, resume=f"{sys.argv[1]}/3 saved/checkpoint-3")
if torch.distributed.get_rank() == 0:
    json.dump(found, open(f"{sys.argv[1]}/losses.json", "w"))
'''
CASES = {"0": {"stage": 0}, "1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3},
         "3 saved": {"stage": 3, "save": True}, "3 offloaded": {"stage": 3, "offload": True},
         "3 recomputed": {"stage": 3, "recompute": True}, "2 bf16": {"stage": 2, "bf16": True},
         "3 bf16": {"stage": 3, "bf16": True}, "0 frozen": {"stage": 0, "freeze": True},
         "3 frozen": {"stage": 3, "freeze": True}, "0 own": {"stage": 0, "own_optimizer": True},
         "3 own": {"stage": 3, "own_optimizer": True}, "0 twice": {"stage": 0, "accumulation": 2},
         "2 twice": {"stage": 2, "accumulation": 2}, "3 twice": {"stage": 3, "accumulation": 2}}


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> dict[str, list[float]]:
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "program.py").write_text(PROGRAM)
    environment = warm_environment({**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    done = subprocess.run(["torchrun", "--nproc-per-node", "2", "program.py", str(folder), json.dumps(CASES)],
                          capture_output=True, text=True, cwd=folder, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "losses.json").read_text())


@pytest.mark.parametrize("name", ["0", "1", "2", "3", "3 saved", "3 offloaded", "3 recomputed"])
def test_the_trainer_has_deepspeeds_losses_at_every_stage(losses, name):
    assert losses[name] == pytest.approx(DEEPSPEED["plain"], rel=1e-5)


@pytest.mark.parametrize("name, other", [("3 bf16", "2 bf16"), ("3 frozen", "0 frozen"), ("3 own", "0 own"),
                                         ("2 twice", "0 twice"), ("3 twice", "0 twice")])
def test_stages_agree_with_bf16_frozen_parameters_own_optimizers_and_accumulation(losses, name, other):
    assert losses[name] == pytest.approx(losses[other], rel=1e-5)
    assert losses[name][-1] < losses[name][0]
    assert losses[name] != pytest.approx(losses["3"], rel=1e-6)


def test_a_run_resumes_from_a_checkpoint_of_the_trainer_at_another_stage(losses):
    assert losses["resumed"] == pytest.approx(losses["3"], rel=1e-5)


def test_the_program_of_the_page_trains_and_resumes(tmp_path):
    program = next(b for b in blocks_of("docs/engine.md") if b.mark == "file: trainer.py")
    (tmp_path / "trainer.py").write_text(program.text)
    environment = warm_environment({**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    for more in ([], ["out/checkpoint-3"]):
        done = subprocess.run(["torchrun", "--nproc-per-node", "2", "trainer.py", "out", *more],
                              capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out/checkpoint-6/global_step6").is_dir()
