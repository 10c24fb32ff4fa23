"""Programs of transformers' Trainer and of accelerate, with and without adapters of peft.

    torchrun --nproc-per-node 2 huggingface.py megatron_ds FOLDER CASES     # or deepspeed; CASES: JSON
    python huggingface.py none FOLDER CASES                                 # one process, without either

A case is the name of a function below with its options: {"3 lora": ["trained", {"stage": 3, "lora": true}]}.
FOLDER/losses.json gets the losses of each update.
"""

import json
import os
import sys
import warnings

import torch

warnings.filterwarnings("ignore")
PACKAGE = sys.argv[1]
FOLDER = sys.argv[2]
CASES = json.loads(sys.argv[3])
if PACKAGE == "megatron_ds":
    import megatron_ds

    megatron_ds.install_as_deepspeed()

from accelerate import Accelerator, DeepSpeedPlugin  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES = 4  # of all ranks together, in a micro-batch
TOKENS = [torch.arange(i, i + 16) % 50 for i in range(32)]
DATA = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
SIZES = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
)
AUTO = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
OPTIMIZER = {
    "type": "AdamW",
    "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
        "auto",
    ),
}


def with_adapters(model):
    """Without `modules_to_save` and dropout, so that all ranks and layouts have the same values."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    )


def model_of_shards():
    """Return a model as `from_pretrained` makes one under stage 3.

    transformers itself does not with "tensor_parallel" in the JSON.
    """
    from safetensors.torch import load_file

    model = LlamaForCausalLM._from_config(LlamaConfig(**SIZES))
    assert all(p.is_meta for p in model.parameters())
    with megatron_ds.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.load_state_dict(load_file(f"{FOLDER}/published/model.safetensors"))
    return model


def make_model(freeze=False, lora=False, published=False, shards=False):
    """published: read from a folder, which under stage 3 makes a model of shards"""
    torch.manual_seed(0)
    if shards:
        model = model_of_shards()
    elif published:
        model = LlamaForCausalLM.from_pretrained(f"{FOLDER}/published")
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    if freeze:
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj.requires_grad_(True)
    return with_adapters(model) if lora else model


def json_of(stage, own_optimizer=False, scheduler=False, offload=False, divided=1):
    """divided: over so many tensor-parallel ranks"""
    zero = {"stage": stage} | (
        {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    )
    if stage == 3 or divided > 1:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = dict.fromkeys(AUTO, "auto") | {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
    }
    config |= {} if own_optimizer else {"optimizer": OPTIMIZER}
    config |= {"tensor_parallel": {"autotp_size": divided}} if divided > 1 else {}
    return config | ({"scheduler": SCHEDULER} if scheduler else {})


def trained(
    out,
    stage=0,
    bf16=False,
    recompute=False,
    accumulation=1,
    save=False,
    resume=None,
    warmup=0,
    json_options=None,
    **model_options,
):
    """Losses of six updates of the Trainer, which begins or resumes, and the files that it saves."""
    AcceleratorState._reset_state(True)
    config = None if PACKAGE == "none" else json_of(stage, **(json_options or {}))
    divided = (json_options or {}).get("divided", 1)
    arguments = TrainingArguments(
        out,
        per_device_train_batch_size=SAMPLES * divided // RANKS,
        max_steps=6,
        learning_rate=1e-2,
        weight_decay=0.01,
        deepspeed=config,
        report_to=[],
        use_cpu=True,
        logging_steps=1,
        disable_tqdm=True,
        bf16=bf16,
        gradient_checkpointing=recompute,
        gradient_accumulation_steps=accumulation,
        warmup_steps=warmup,
        save_strategy="steps" if save else "no",
        save_steps=3,
    )
    trainer = Trainer(
        model=make_model(**model_options), args=arguments, train_dataset=DATA
    )
    trainer.train(resume_from_checkpoint=resume and f"{FOLDER}/{resume}")
    trainer.save_model(f"{out}/model")
    if PACKAGE == "megatron_ds":
        assert (
            type(trainer.model_wrapped).__module__ == "megatron_ds.compat.engine.engine"
        )
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def looped(out, stage=0, accumulation=1, bf16=False, lora=False):
    """A loop with accelerate: losses of eight micro-batches, then those after a save and a load of them."""
    AcceleratorState._reset_state(True)
    plugin = (
        None
        if PACKAGE == "none"
        else DeepSpeedPlugin(
            zero_stage=stage,
            gradient_accumulation_steps=accumulation,
            gradient_clipping=1.0,
            zero3_init_flag=False,
            zero3_save_16bit_model=True,
        )
    )
    accelerator = Accelerator(
        cpu=True,
        deepspeed_plugin=plugin,
        mixed_precision="bf16" if bf16 else "no",
        gradient_accumulation_steps=accumulation,
    )
    model = make_model(lora=lora)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + step // RANKS)
    )
    loader = DataLoader(DATA, SAMPLES // RANKS)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, loader, scheduler
    )
    losses = one_epoch(accelerator, model, optimizer, loader, scheduler)
    # A second epoch, and the same again from what was saved before it.
    accelerator.save_state(f"{out}/state")
    second = one_epoch(accelerator, model, optimizer, loader, scheduler)
    accelerator.load_state(f"{out}/state")
    again = one_epoch(accelerator, model, optimizer, loader, scheduler)
    assert torch.allclose(torch.tensor(second), torch.tensor(again), rtol=1e-6), (
        second,
        again,
    )
    # The whole weights, as programs save them.
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(
            f"{out}/model", state_dict=state
        )
    return losses + second


def one_epoch(accelerator, model, optimizer, loader, scheduler):
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).float().mean().item())
    return losses


def main():
    if RANKS > 1:
        Accelerator(cpu=True)  # starts the processes
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        make_model().save_pretrained(f"{FOLDER}/published")
    if RANKS > 1:
        torch.distributed.barrier()
    functions, found = {"trained": trained, "looped": looped}, {}
    for name, (kind, options) in CASES.items():
        found[name] = functions[kind](f"{FOLDER}/{name}", **options)
        if rank == 0:
            with open(f"{FOLDER}/losses.json", "w") as file:
                json.dump(found, file)


main()
