"""The processes that run untrusted code: standard library only, so that a worker forks in
milliseconds.

zygote = supervisor (one per worker, reads jobs) -> forker (one per worker, never sees a job)
-> per job a judge and a candidate, or an init and its program.
"""
