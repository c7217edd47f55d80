"""Reads rows, turns text into tokens, decides the order of rows, and balances work over ranks."""
