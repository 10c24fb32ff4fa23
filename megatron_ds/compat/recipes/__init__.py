"""Recipes of other projects, shell scripts, YAML and JSON files, read without running them."""
