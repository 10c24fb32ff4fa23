"""`megatron-ds draw-context`: draw how context-parallel ranks share a sequence. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("draw-context")
