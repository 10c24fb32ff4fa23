"""Scores of text by a model under any layout, and the evaluations that use them."""
