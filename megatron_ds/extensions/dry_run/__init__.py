"""What --dry-run prints: the plan of a run, whether it fits a device, and the longest sequence that does. What a run
logs of itself before its first step."""
