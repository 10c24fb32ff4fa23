"""`megatron-ds serve`: serve a checkpoint over HTTP. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("serve")
