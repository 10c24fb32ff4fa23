"""A program for DeepSpeed in the manner of its CIFAR-10 tutorial: arguments, a loader from `training_data`,
fp16 or bf16.

    torchrun --nproc-per-node 2 cifar.py --stage 2 --dtype bf16 --epochs 2 --losses losses.json

The images are made up: of ten classes, each with a pattern of its own under noise.
"""

import argparse
import json

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F


def add_arguments():
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-e", "--epochs", default=2, type=int)
    parser.add_argument(
        "--local_rank",
        type=int,
        default=-1,
        help="local rank passed from distributed launcher",
    )
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument(
        "--dtype", default="bf16", type=str, choices=["bf16", "fp16", "fp32"]
    )
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser.add_argument(
        "--losses",
        default=None,
        help="write the loss of each micro-batch of rank 0 to this file",
    )
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def get_ds_config(args):
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {
                "lr": 0.001,
                "betas": [0.8, 0.999],
                "eps": 1e-8,
                "weight_decay": 3e-7,
            },
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 0.001,
                "warmup_num_steps": 10,
            },
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 60)
        self.fc2 = nn.Linear(60, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 3, 32, 32, generator=generator)
    return torch.utils.data.TensorDataset(patterns[labels] / 2 + noise, labels)


def test(model_engine, testset, local_device, target_dtype):
    """Accuracy on the whole test set."""
    model_engine.eval()
    correct = 0
    with torch.no_grad():
        for inputs, labels in torch.utils.data.DataLoader(testset, batch_size=8):
            inputs = inputs.to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            predicted = model_engine(inputs).argmax(1)
            correct += (predicted == labels.to(local_device)).sum().item()
    model_engine.train()
    return correct / len(testset)


def main(args):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, scheduler = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=parameters,
        training_data=images(100, seed=2),
        config=get_ds_config(args),
    )

    local_device, local_rank = model_engine.device, model_engine.local_rank
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()

    losses, rates = [], []
    for epoch in range(args.epochs):
        running_loss = 0.0
        for i, data in enumerate(trainloader):
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            running_loss += loss.item()
            losses.append(loss.item())
            rates.append(optimizer.param_groups[0]["lr"])
            if local_rank == 0 and i % args.log_interval == args.log_interval - 1:
                print(
                    f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / args.log_interval:.3f}"
                )
                running_loss = 0.0
    accuracy = test(model_engine, images(40, seed=3), local_device, target_dtype)
    if local_rank == 0:
        print(
            f"accuracy {accuracy:.2f} at stage {model_engine.zero_optimization_stage()}, "
            f"learning rate {scheduler.get_last_lr()[0]:.1e}"
        )
        if args.losses:
            with open(args.losses, "w") as file:
                json.dump({"losses": losses, "rates": rates}, file)


if __name__ == "__main__":
    main(add_arguments())
