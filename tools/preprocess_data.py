"""`megatron-ds preprocess`: turn text into tokens for training. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("preprocess")
