"""Runs of programs that know nothing of this package: TRL's scripts and one of the Trainer, on two ranks.

A run is a program, a way to start it and a ZeRO stage; `losses` has the losses of its steps. Model, tokenizer and
texts are made here, so that nothing is downloaded.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from megatron_ds.compat.deepspeed.program_environment import environment_with_name
from tests.harness.limits import HUNG

from .clusters import free_port

RANKS = 2
ROWS = 16
WORDS = 60
TEXT_MODEL = Path(__file__).parents[1] / "deepspeed_scripts" / "text_model.py"
TORCHRUN = ["-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
ACCELERATE = ["-m", "accelerate.commands.launch", f"--num_processes={RANKS}"]
LAUNCH = ["-m", "megatron_ds", "launch", "--as-deepspeed"]
COMMAND = ["-m", "megatron_ds.as_deepspeed"]
ARGUMENTS = """--max_steps 3 --per_device_train_batch_size 2 --learning_rate 1e-2 --lr_scheduler_type constant
    --logging_steps 1 --report_to none --save_strategy steps --save_steps 3 --bf16 false --use_cpu true --seed 0"""
# What a program takes besides ARGUMENTS, and the columns of its texts, with the number of words.
OF_TRL = "--dtype float32 --gradient_checkpointing false"
PROGRAMS = {
    "text_model": ("", {"text": 12}),
    "sft": (f"{OF_TRL} --max_length 32", {"prompt": 5, "completion": 4}),
    "dpo": (f"{OF_TRL} --max_length 32", {"prompt": 5, "chosen": 4, "rejected": 3}),
    "kto": (f"{OF_TRL} --max_length 32", {"prompt": 5, "completion": 4}),
    "grpo": (
        f"{OF_TRL} --num_generations 2 --max_completion_length 6 --beta 0.05 --reward_funcs rewards.different",
        {"prompt": 4},
    ),
}
REWARDS = """
def different(completions, **others):
    return [float(len(set(text.split()))) for text in completions]
"""
AUTO = "auto"
JSON = {
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
}


def trl_file(*names: str) -> str:
    """The path of a file of TRL."""
    package = importlib.util.find_spec("trl")
    return str(Path(package.submodule_search_locations[0], *names))


def make_inputs(folder: Path) -> None:
    """Write a model with its tokenizer, and the texts of each program."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # The model.
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    words = models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", **special
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=len(names), num_attention_heads=2, pad_token_id=0, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    # The texts.
    generator = torch.Generator().manual_seed(2)

    def text(length: int) -> str:
        numbers = torch.randint(WORDS, (length,), generator=generator)
        return " ".join(f"w{number}" for number in numbers.tolist())

    for program, (_, columns) in PROGRAMS.items():
        rows = [
            {name: f" {text(length)}" for name, length in columns.items()}
            | ({"label": i % 2 == 0} if program == "kto" else {})
            for i in range(ROWS)
        ]
        (folder / program).mkdir()
        lines = "\n".join(map(json.dumps, rows))
        (folder / program / "train.jsonl").write_text(lines)
    # What programs read besides.
    (folder / "rewards.py").write_text(REWARDS)
    for stage in (2, 3):
        block = {**JSON, "zero_optimization": {"stage": stage}}
        (folder / f"zero{stage}.json").write_text(json.dumps(block))


def command(folder: Path, program: str, way: str, stage: int) -> list[str]:
    """The words behind `python`. way: of `losses`"""
    script = str(TEXT_MODEL)
    if program != "text_model":
        script = trl_file("scripts", f"{program}.py")
    more, _ = PROGRAMS[program]
    places = f"--model_name_or_path model --dataset_name {program}"
    out = folder / f"{program}-{way}-{stage}"
    words = [script, *f"{places} {ARGUMENTS} {more}".split(), "--output_dir", str(out)]
    if way == "accelerate":
        file = trl_file("accelerate_configs", f"zero{stage}.yaml")
        port = f"--main_process_port={free_port()}"
        start = [*ACCELERATE, "--config_file", file, "--mixed_precision=no", port]
        return [*start, *words]
    port = str(free_port())
    torchrun = [*TORCHRUN, f"--master-port={port}"]
    starts = {
        "ddp": torchrun,
        "torchrun": torchrun,
        "command": [*COMMAND, *torchrun],
        "launch": [*LAUNCH, "--num_gpus", str(RANKS), "--master_port", port],
    }
    with_json = [] if way == "ddp" else ["--deepspeed", f"zero{stage}.json"]
    return [*starts[way], *words, *with_json]


def losses(folder: Path, program: str, way: str, stage: int = 0) -> list[float]:
    """Losses of the steps of a program.

    way  "ddp": without an engine. "torchrun" and "accelerate": with the folder on PYTHONPATH. "command" and
         "launch": by this package's commands
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "TQDM_DISABLE": "1",
    }
    if way in ("torchrun", "accelerate"):
        environment = environment_with_name(environment)
    done = subprocess.run(
        [sys.executable, *command(folder, program, way, stage)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HUNG,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    state = folder / f"{program}-{way}-{stage}" / "checkpoint-3" / "trainer_state.json"
    log = json.loads(state.read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]
