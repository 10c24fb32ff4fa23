"""Hugging Face folders: settings, names of tensors and experts of each family, in both directions."""
