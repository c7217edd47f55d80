"""The commands of users, one file each: a console script, ``python -m`` and ``tools/NAME.py``.

Nothing else imports this room.
"""
