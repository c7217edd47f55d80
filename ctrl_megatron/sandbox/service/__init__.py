"""The service: HTTP endpoints, the queue of jobs, data sets, grading."""
