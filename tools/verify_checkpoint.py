"""`megatron-ds verify`: compare a checkpoint with its checksums. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("verify")
