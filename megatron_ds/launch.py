"""`python -m megatron_ds.launch`: the same as `megatron-ds launch`."""

from .commands import run

if __name__ == "__main__":
    run("launch", program="megatron_ds.launch")
