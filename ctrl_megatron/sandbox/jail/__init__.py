"""The processes that run untrusted code: standard library only, so that a worker forks in
milliseconds.

zygote (one per worker) -> supervisor (one per job) -> init (pid 1) -> judge and candidate.
"""
