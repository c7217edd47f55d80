"""Task graphs: what a pipeline is made of, and how every rank executes it."""
