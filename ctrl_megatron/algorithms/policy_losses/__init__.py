"""Policy losses per token, one idea per file."""
