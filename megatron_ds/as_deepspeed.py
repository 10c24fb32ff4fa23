"""`python -m megatron_ds.as_deepspeed`: the same as `megatron-ds as-deepspeed`."""

from .commands import run

if __name__ == "__main__":
    run("as-deepspeed", program="megatron_ds.as_deepspeed")
