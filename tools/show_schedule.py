"""`megatron-ds schedule`: draw a pipeline schedule, planned or measured. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("schedule")
