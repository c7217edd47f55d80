"""Supervised fine-tuning of the actor: its examples, objective, graph and run."""
