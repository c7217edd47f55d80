"""A run from its configuration to its end: checks, models, services, the loop, evaluation."""
