"""Tokenizers that are read from files."""
