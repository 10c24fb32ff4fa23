"""Data parallelism and optimizer state: gradients in buckets, ZeRO sharding, norm, clipping, loss scaling."""
