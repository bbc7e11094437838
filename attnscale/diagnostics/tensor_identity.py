"""Whether tensors are still those that were seen: neither computed again nor changed since."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from attnscale._util.uncopied import Uncopied


class Same(Uncopied):
    """Remembers tensors without keeping their memory; autograd's own count of changes tells the rest.

    >>> import torch
    >>> x = torch.zeros(3)
    >>> seen = Same(x)
    >>> seen.are(x.detach()), seen.are(x.clone()), seen.are(x.add_(1))
    (True, False, False)
    """

    def __init__(self, *tensors: Tensor) -> None:
        # The weak reference keeps the storage's identity from being given to another.
        self._storages = [StorageWeakRef(x.untyped_storage()) for x in tensors]  # type: ignore[no-untyped-call]
        self._marks = [_mark(x) for x in tensors]

    def are(self, *tensors: Tensor) -> bool:
        """Whether these are the same, one by one."""
        return len(tensors) == len(self._marks) and all(
            storage.cdata == x.untyped_storage()._cdata and mark == _mark(x)
            for x, storage, mark in zip(tensors, self._storages, self._marks, strict=True)
        )


def _mark(x: Tensor) -> tuple[object, ...]:
    # What was made in inference mode has no count, but it has no backward either.
    return x.shape, x.stride(), x.storage_offset(), None if x.is_inference() else x._version
