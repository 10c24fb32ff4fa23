"""What follows from a configuration before a run: stages, memory, traffic, FLOPs and times of the ranks."""
