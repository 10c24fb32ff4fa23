"""What a run reports: log lines, sinks, profiles and statistics."""
