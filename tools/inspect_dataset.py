"""`megatron-ds inspect`: show what is in a corpus, and check it. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("inspect")
