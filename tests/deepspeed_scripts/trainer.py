"""A program for DeepSpeed in the manner of Hugging Face's Trainer: a language model of transformers, "auto"
in the JSON, an AdamW with two parameter groups, a scheduler of torch's, accumulation, weights read whole,
changed and saved.

    torchrun --nproc-per-node 2 trainer.py --stage 3 --dtype bf16 --output_dir out --losses losses.json
"""

import argparse
import json
import os

import deepspeed
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 96, 16
JSON = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def filled(config, args, world_size):
    """The JSON with its "auto" replaced where the arguments of the trainer say it; the rest is left to the
    library."""
    known = {
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "train_batch_size": args.per_device_train_batch_size
        * args.gradient_accumulation_steps
        * world_size,
    }
    config = {
        key: known.get(key, value) if value == "auto" else value
        for key, value in config.items()
    }
    config["fp16"] = config["fp16"] | {"enabled": args.dtype == "fp16"}
    config["bf16"] = {"enabled": args.dtype == "bf16"}
    config["zero_optimization"] = config["zero_optimization"] | {"stage": args.stage}
    return config


def make_model(config):
    """Under `zero.Init` at stage 3, then with weights that rank 0 has."""
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with deepspeed.zero.Init(
        config_dict_or_path=config, enabled=config["zero_optimization"]["stage"] == 3
    ):
        model = LlamaForCausalLM(shape)
    generator = torch.Generator().manual_seed(11)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(
                        torch.randn(p.shape, generator=generator) * 0.05
                        if p.dim() > 1
                        else torch.ones(p.shape)
                    )
    return model


def make_optimizer(model, args):
    decayed = {
        n
        for n, p in model.named_parameters()
        if "norm" not in n and not n.endswith("bias")
    }
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if n in decayed],
            "weight_decay": args.weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if n not in decayed],
            "weight_decay": 0.0,
        },
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.98), eps=1e-8)


def linear_with_warmup(optimizer, warmup, total):
    def factor(step):
        return (
            step / warmup
            if step < warmup
            else max(0.0, (total - step) / (total - warmup))
        )

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def embedding_norm(model):
    """What a user looks at in the middle of things."""
    weight = model.get_input_embeddings().weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=None):
        return weight.detach().float().norm().item()


def made_up_text(count):
    first = torch.randint(
        VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(5)
    )
    rows = [first]
    for at in range(1, LENGTH):
        rows.append((3 * rows[-1] + at) % VOCABULARY)
    return [{"input_ids": row, "labels": row} for row in torch.cat(rows, 1)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--per_device_train_batch_size", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--warmup_steps", type=int, default=2)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--output_dir")
    parser.add_argument("--losses")
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()

    deepspeed.init_distributed()
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    config = filled(JSON, args, world_size)
    model = make_model(config)
    data = made_up_text(48)
    loader = DataLoader(
        data,
        args.per_device_train_batch_size,
        sampler=DistributedSampler(data, world_size, rank, seed=1),
    )
    optimizer = make_optimizer(model, args)
    updates = args.num_train_epochs * len(loader) // args.gradient_accumulation_steps
    scheduler = linear_with_warmup(optimizer, args.warmup_steps, updates)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    losses, rates, norms, embeddings = [], [], [], []
    for epoch in range(args.num_train_epochs):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            batch = {key: value.to(engine.device) for key, value in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            updates = engine.is_gradient_accumulation_boundary()
            if updates:
                rates.append(scheduler.get_last_lr()[0])
            engine.step()
            if updates and (norm := engine.get_global_grad_norm()) is not None:
                norms.append(float(norm))
            losses.append(loss.item())
        embeddings.append(embedding_norm(engine.module))
    if args.output_dir:
        engine.save_16bit_model(args.output_dir, "pytorch_model.bin")
        deepspeed.comm.barrier()
    if rank == 0:
        saved = (
            torch.load(
                os.path.join(args.output_dir, "pytorch_model.bin"), weights_only=True
            )
            if args.output_dir
            else {}
        )
        if args.losses:
            with open(args.losses, "w") as file:
                json.dump(
                    {
                        "losses": losses,
                        "rates": rates,
                        "norms": norms,
                        "embeddings": embeddings,
                        "steps": engine.global_steps,
                        "saved": {
                            name: float(value.float().norm())
                            for name, value in saved.items()
                        },
                    },
                    file,
                )


if __name__ == "__main__":
    main()
