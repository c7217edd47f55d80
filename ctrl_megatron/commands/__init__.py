"""What a user types, one file per command: a console script, ``python -m`` and ``tools/NAME.py``.

Nothing else imports this room.
"""
