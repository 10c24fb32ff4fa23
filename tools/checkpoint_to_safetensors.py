"""`megatron-ds export`: write weights, with this package's names, as safetensors. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("export")
