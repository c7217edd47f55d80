"""What every process of a worker knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ctrl_megatron.sandbox.isolation import Confinement
from ctrl_megatron.sandbox.jail import files, frames, linux, namespaces
from ctrl_megatron.sandbox.limits import SandboxLimits

_SPEC_BYTES = 1 << 30


def read_spec(fd: int) -> dict[str, Any]:
    """What the supervisor tells a new process of a job, through a pipe for this alone."""
    told = frames.receive(fd, limit=_SPEC_BYTES)
    os.close(fd)
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What every job of a worker shares."""

    confinement: Confinement
    limits: SandboxLimits
    scratch: str
    """Directory for private directories where there are no mount namespaces."""

    @property
    def isolated(self) -> bool:
        """Whether jobs get namespaces."""
        return self.confinement.reached.tier == "namespaces"

    def settle(self, spec: Mapping[str, Any]) -> str:
        """Take the calling process to its private directory, write the job's files there and drop
        every capability; the directory's path.

        A tmpfs of its own that ends with the process, or ``spec["directory"]`` where there are no
        mount namespaces.
        """
        directory = namespaces.TMP if self.isolated else spec["directory"]
        if self.isolated:
            ipc = not self.confinement.reached.seccomp
            namespaces.enter_job(self.limits.disk_mb << 20, ipc=ipc)
        os.chdir(directory)
        linux.drop_capabilities()
        files.write(directory, spec["files"])
        return directory

    def confine(
        self,
        directory: str | None,
        *,
        memory_mb: int,
        cpu_seconds: float,
        profile: str | None = None,
    ) -> None:
        """Confine the calling process for good; it may write in ``directory`` only."""
        self.confinement.apply(
            directory,
            memory_bytes=memory_mb << 20,
            cpu_seconds=cpu_seconds,
            profile=profile,
            file_bytes=self.limits.file_bytes,
            open_files=self.limits.open_files,
            processes=self.limits.processes,
        )
