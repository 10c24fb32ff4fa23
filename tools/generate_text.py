"""`megatron-ds generate`: continue text with a trained model. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("generate")
