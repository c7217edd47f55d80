"""Python objects that ranks send each other, signed with a key of the run.

torch.distributed sends objects as pickles, and gloo asks nobody who they are: what a stranger wrote
into a rank's connection would run there.
"""

from __future__ import annotations

import hmac
import pickle
from typing import Any, Protocol

from torch.distributed import distributed_c10d

_DIGEST = "sha256"
_BYTES = 32

_key = b""
"""Without a key of the run everybody can sign."""


class _File(Protocol):
    def read(self) -> bytes: ...

    def write(self, data: bytes, /) -> Any: ...


class ForeignObjectError(RuntimeError):
    """No process of this run has sent the object."""


def signed_pickle(value: Any) -> bytes:
    """``value`` as a pickle behind its signature."""
    body = pickle.dumps(value)
    return hmac.digest(_key, body, _DIGEST) + body


def verified_unpickle(data: bytes) -> Any:
    """The object in ``data``, which ``signed_pickle`` returned. Raises ForeignObjectError, before
    anything is unpickled, if a process with another key signed it.
    """
    body = data[_BYTES:]
    if not hmac.compare_digest(data[:_BYTES], hmac.digest(_key, body, _DIGEST)):
        raise ForeignObjectError(
            "an object from another process than this run's ranks has arrived, or the hosts have "
            "different values of CTRL_RUN_KEY: nothing of it was read"
        )
    return pickle.loads(body)


def install_object_signing(key: bytes) -> None:
    """Let torch.distributed sign every object that this process sends, and read no other."""
    global _key
    _key = key
    distributed_c10d._pickler = _Signing  # type: ignore[assignment]
    distributed_c10d._unpickler = _Checking  # type: ignore[assignment]


class _Signing:
    """Takes the place of ``pickle.Pickler`` there."""

    def __init__(self, file: _File) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        self._file.write(signed_pickle(value))


class _Checking:
    """Takes the place of ``pickle.Unpickler`` there."""

    def __init__(self, file: _File) -> None:
        self._file = file

    def load(self) -> Any:
        return verified_unpickle(self._file.read())
