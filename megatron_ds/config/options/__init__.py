"""Options, a dataclass for each section of the configuration: names, types, defaults and help."""
