"""Memory of tensors that leaves the device and comes back.

The tensors stay the objects they are, and so do all views of them: only the storage below them
becomes empty and is filled again. So Megatron's buffers, the optimizer's references and recorded
graphs never notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


class OffloadedTensors:
    """Some tensors, looked up each time, whose memory is on the device or away.

    What ``keep`` is on for is copied to host memory, page-locked where the device is a GPU; the
    host's copy is allocated once. Without ``keep`` the tensors come back as zeros.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], *, keep: bool) -> None:
        self._tensors, self._keep = tensors, keep
        self._copies: dict[int, torch.Tensor] = {}
        self._empty: list[tuple[torch.UntypedStorage, int]] = []

    @property
    def away(self) -> bool:
        """True between ``leave`` and ``come_back``."""
        return bool(self._empty)

    def leave(self) -> None:
        """Empty the storages. The tensors must not be read until they are back."""
        if self.away:
            return
        storages = storages_of(self._tensors())
        self._copies = {known: self._copies[known] for known in storages.keys() & self._copies}
        for identity, storage in storages.items():
            if self._keep:
                self._copy_of(identity, storage).copy_(_bytes_of(storage))
        for storage in storages.values():
            self._empty.append((storage, storage.nbytes()))
            storage.resize_(0)

    def come_back(self) -> None:
        """Undo ``leave``."""
        for storage, size in self._empty:
            storage.resize_(size)
            whole = _bytes_of(storage)
            if self._keep:
                whole.copy_(self._copies[storage._cdata])
            else:
                whole.zero_()
        self._empty.clear()

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The same view of the host's copy as ``tensor`` is of what is away; None of anything else,
        and of what comes back as zeros."""
        storage = tensor.untyped_storage()
        copy = self._copies.get(storage._cdata)
        if copy is None or storage.nbytes():
            return None
        view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        return view.set_(copy.untyped_storage(), *place)  # type: ignore[call-overload]

    def _copy_of(self, identity: int, storage: torch.UntypedStorage) -> torch.Tensor:
        copy = self._copies.get(identity)
        if copy is None or copy.numel() != storage.nbytes():
            copy = torch.empty(
                storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
            )
            self._copies[identity] = copy
        return copy


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The storages below the tensors, each once, by what tells them apart; empty ones left out."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage._cdata, storage)
    return found


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
