"""`megatron-ds merge-adapter`: add adapters to the weights of a checkpoint. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("merge-adapter")
