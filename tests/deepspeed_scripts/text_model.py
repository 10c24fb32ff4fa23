"""A program of transformers' Trainer, as its run_clm.py: all settings are arguments, and no replica is named.

torchrun --nproc-per-node 2 text_model.py --model_name_or_path MODEL --dataset_name FOLDER --output_dir OUT …
"""

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Places:
    """model_name_or_path and dataset_name: folders of the model with its tokenizer, and of train.jsonl"""

    model_name_or_path: str
    dataset_name: str


def main() -> None:
    """Train, and save the model."""
    parser = HfArgumentParser((Places, TrainingArguments))
    places, arguments = parser.parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(places.model_name_or_path)
    lines = Path(places.dataset_name, "train.jsonl").read_text().splitlines()
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(places.model_name_or_path),
        args=arguments,
        train_dataset=[tokenizer(json.loads(line)["text"]) for line in lines],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
