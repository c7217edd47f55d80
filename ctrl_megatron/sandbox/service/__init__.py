"""The service: HTTP routes, the queue of jobs, the workers, and grading."""
