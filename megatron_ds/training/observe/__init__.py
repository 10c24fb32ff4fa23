"""What a run reports: log lines, sinks of records, and facts of the run."""
