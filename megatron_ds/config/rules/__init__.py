"""Rules: functions from a configuration to the problems that it has."""
