"""Generating with a live engine outside of training."""
