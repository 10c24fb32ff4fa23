"""DeepSpeed's public names, each an object of this package or an error with advice."""
