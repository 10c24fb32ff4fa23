"""`python -m megatron_ds COMMAND …`, and `torchrun … -m megatron_ds train …`."""

from .commands import main

if __name__ == "__main__":
    main()
