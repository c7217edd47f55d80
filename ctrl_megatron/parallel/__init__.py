"""Layout arithmetic, process groups, vocabulary-parallel log-probs, the CPU platform."""
