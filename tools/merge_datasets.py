"""`megatron-ds merge`: merge several corpora into one. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("merge")
