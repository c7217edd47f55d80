"""Supervised fine-tuning of the critic: its targets and its objective."""
