"""Engines that generate text from live weights, each in a separate process."""
