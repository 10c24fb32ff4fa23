"""The commands of `megatron-ds`, one module each; tools/ of the checkout has a script for each of them."""
