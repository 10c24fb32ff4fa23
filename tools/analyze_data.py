"""`megatron-ds analyze`: measure how difficult samples are, for a curriculum. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("analyze")
