"""The directory of a service's files, which outlives a service that is killed until the next one of
the same user starts.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile

from ctrl_megatron.sandbox.jail.files import remove_tree
from ctrl_megatron.sandbox.service.worker import SCRATCH_MODE

_PREFIX, _UNSEEN = "ctrl-sandbox-files-", "ctrl-sandbox-making-"
_log = logging.getLogger(__name__)


class Scratch:
    """A new directory ``name`` below ``TMPDIR``. A lock on it, which ends with this process in
    whatever way, says that it is in use.
    """

    def __init__(self) -> None:
        _remove_left()
        # Nobody looks at a directory of that name, so that it is locked before it is seen.
        made = tempfile.mkdtemp(prefix=_UNSEEN)
        self._lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.chmod(made, SCRATCH_MODE)
        folder, name = os.path.split(made)
        self.name = os.path.join(folder, _PREFIX + name.removeprefix(_UNSEEN))
        os.rename(made, self.name)

    def remove(self) -> None:
        remove_tree(self.name)
        os.close(self._lock)


def _remove_left() -> None:
    """Remove the directories of this user that no service uses."""
    for entry in os.scandir(tempfile.gettempdir()):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(entry.path)
            finally:
                os.close(lock)
        except BlockingIOError:
            continue  # in use
        except OSError as error:
            # Another start may remove it too, and no service needs it gone.
            _log.warning("%s of an ended service was not removed: %s", entry.path, error)
