"""What follows from a configuration before a run: pipeline stages, memory, messages, FLOPs and time of each rank."""
