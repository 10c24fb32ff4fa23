"""Checkpoints of Megatron-LM and Megatron-DeepSpeed: torch files of a rank each, and torch_dist folders."""
