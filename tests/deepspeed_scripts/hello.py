"""A program for DeepSpeed in the manner of HelloDeepSpeed: a masked language model, checkpoints with a
client_state, resuming.

    torchrun --nproc-per-node 2 hello.py --stage 1 --dtype bf16 --checkpoint_dir run --num_iterations 6
    torchrun --nproc-per-node 2 hello.py --stage 1 --dtype bf16 --load_checkpoint_dir run --num_iterations 12

The text is made up: words follow each other in a fixed manner, with some noise.
"""

import argparse
import json
import os

import deepspeed
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

MASK, VOCABULARY, LENGTH, IGNORED = 1, 64, 24, -100


class MadeUpText(Dataset):
    """Sample i: {"src_tokens", "tgt_tokens"}, a seventh of the words masked."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(1000 + i)
        words = torch.empty(LENGTH, dtype=torch.long)
        words[0] = torch.randint(2, VOCABULARY, (), generator=generator)
        for at in range(1, LENGTH):
            words[at] = 2 + (5 * words[at - 1] + 3) % (VOCABULARY - 2)
        masked = torch.rand(LENGTH, generator=generator) < 0.15
        masked[i % LENGTH] = True
        return {
            "src_tokens": words.masked_fill(masked, MASK),
            "tgt_tokens": words.masked_fill(~masked, IGNORED),
        }


class MaskedLanguageModel(nn.Module):
    """An encoder of torch's, and a head as BERT's, whose matrix is that of the embedding."""

    def __init__(self, hidden=32, layers=2, heads=4):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, hidden)
        self.places = nn.Embedding(LENGTH, hidden)
        self.norm = nn.LayerNorm(hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 4 * hidden, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.dense = nn.Linear(hidden, hidden)
        self.head_norm = nn.LayerNorm(hidden)
        self.decoder = nn.Linear(hidden, VOCABULARY)
        self.decoder.weight = self.words.weight

    def forward(self, src_tokens, tgt_tokens):
        places = torch.arange(src_tokens.size(1), device=src_tokens.device)
        x = self.encoder(self.norm(self.words(src_tokens) + self.places(places)))
        scores = self.decoder(self.head_norm(nn.functional.gelu(self.dense(x))))
        return nn.functional.cross_entropy(
            scores.float().view(-1, VOCABULARY),
            tgt_tokens.view(-1),
            ignore_index=IGNORED,
        )


def load_model_checkpoint(load_checkpoint_dir, model):
    _, client_state = model.load_checkpoint(load_dir=load_checkpoint_dir)
    return client_state["checkpoint_step"]


def train(
    checkpoint_dir,
    load_checkpoint_dir,
    stage,
    dtype,
    batch_size,
    num_iterations,
    checkpoint_every,
    losses_file,
):
    deepspeed.init_distributed(
        dist_backend="gloo" if not torch.cuda.is_available() else "nccl"
    )
    rank, world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(7)
    model = MaskedLanguageModel()
    ds_config = {
        "train_micro_batch_size_per_gpu": batch_size,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "fp16": {"enabled": dtype == "fp16"},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage},
    }
    model, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config
    )
    start_step = 1
    if load_checkpoint_dir is not None:
        start_step = load_model_checkpoint(load_checkpoint_dir, model) + 1

    samples = MadeUpText(batch_size * world * num_iterations)
    mine = list(range(rank, len(samples), world))[(start_step - 1) * batch_size :]
    loader = DataLoader(torch.utils.data.Subset(samples, mine), batch_size=batch_size)
    model.train()
    losses = []
    for step, batch in enumerate(loader, start=start_step):
        batch = {key: value.to(model.device) for key, value in batch.items()}
        loss = model(**batch)
        model.backward(loss)
        model.step()
        losses.append(loss.item())
        if step % checkpoint_every == 0 and checkpoint_dir is not None:
            model.save_checkpoint(
                save_dir=checkpoint_dir, client_state={"checkpoint_step": step}
            )
    if checkpoint_dir is not None:
        model.save_checkpoint(
            save_dir=checkpoint_dir, tag="last", client_state={"checkpoint_step": step}
        )
        deepspeed.comm.barrier()
        assert open(os.path.join(checkpoint_dir, "latest")).read().strip() == "last"
    if rank == 0 and losses_file:
        with open(losses_file, "w") as file:
            json.dump({"losses": losses, "steps": model.global_steps}, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint_dir")
    parser.add_argument("--load_checkpoint_dir")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--num_iterations", type=int, default=12)
    parser.add_argument("--checkpoint_every", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--losses", dest="losses_file")
    args = parser.parse_args()
    args.__dict__.pop("local_rank")
    train(**vars(args))
