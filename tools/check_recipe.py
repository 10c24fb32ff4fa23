"""`megatron-ds check`: list what a recipe of Megatron or DeepSpeed would do here. Flags: --help."""

from megatron_ds.commands import run

if __name__ == "__main__":
    run("check")
