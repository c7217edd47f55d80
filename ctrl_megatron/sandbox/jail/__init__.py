"""The processes that run untrusted code: standard library only, so that a worker forks in
milliseconds.

A worker is two processes: a supervisor, which reads jobs, and its child, a fork server, which never
sees one. From the fork server come, for each job, a judge and a candidate, or an init and its
program.
"""
