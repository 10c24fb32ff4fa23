"""Mixers with a state of constant size in place of attention: gated delta net and Mamba-2."""
