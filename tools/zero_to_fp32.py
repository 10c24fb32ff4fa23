"""`megatron-ds zero-to-fp32`: take the fp32 weights out of an engine's checkpoint. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("zero-to-fp32")
