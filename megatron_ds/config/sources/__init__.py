"""Sources of a configuration: flags and files, read into settings, combined, and written as text."""
