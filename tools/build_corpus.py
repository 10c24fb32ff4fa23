"""`megatron-ds corpus`: build a corpus of English from the documentation of this Python. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("corpus")
