"""`megatron-ds prepare-cache`: build the index maps of a training before it starts. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("prepare-cache")
