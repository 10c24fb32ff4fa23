"""`megatron-ds search`: find the fastest layouts of a training, by planned seconds. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("search")
