"""`megatron-ds plot-experts`: draw how evenly the experts of a run are used. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("plot-experts")
