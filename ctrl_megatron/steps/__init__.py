"""The steps of the built-in pipelines: generation, judging, advantages and updates, as nodes."""
