"""`megatron-ds evaluate`: evaluate a checkpoint at any layout. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("evaluate")
