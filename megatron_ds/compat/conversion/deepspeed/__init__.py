"""Checkpoints of DeepSpeed: ZeRO shards, stage 0, experts, and universal folders."""
