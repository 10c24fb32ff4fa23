"""`megatron-ds upcycle`: make a checkpoint with experts from a dense one. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("upcycle")
