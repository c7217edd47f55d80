"""The processes that run untrusted code. Standard library only, so that a worker forks in
milliseconds.

A worker consists of two processes: a supervisor, which reads jobs, and its child, a fork server,
which never sees one. The fork server starts the processes of a job: a judge and a candidate, or an
init process and its program.
"""
