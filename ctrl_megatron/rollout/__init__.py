"""Engines that generate text from live weights, each in a process of its own."""
