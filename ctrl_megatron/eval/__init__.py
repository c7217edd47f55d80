"""What critiques are worth on held-out problems."""
