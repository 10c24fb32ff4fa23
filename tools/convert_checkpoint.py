"""`megatron-ds convert`: convert checkpoints of Hugging Face, Megatron and DeepSpeed. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("convert")
