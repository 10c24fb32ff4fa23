"""`megatron-ds plot-loss`: draw the loss curve of a run. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("plot-loss")
