"""`megatron-ds longest-sequence`: find the longest sequence that fits the memory. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("longest-sequence")
