"""Whether tensors are still the same: neither computed again nor changed since."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from attnscale._util.uncopied import Uncopied


class TensorIdentity(Uncopied):
    """Remembers tensors without keeping their memory; autograd's version counter tells whether they were changed.

    >>> import torch
    >>> x = torch.zeros(3)
    >>> identity = TensorIdentity(x)
    >>> identity.matches(x.detach()), identity.matches(x.clone()), identity.matches(x.add_(1))
    (True, False, False)
    """

    def __init__(self, *tensors: Tensor) -> None:
        # The weak reference keeps the storage's identity from being given to another.
        self._storages = [StorageWeakRef(x.untyped_storage()) for x in tensors]  # type: ignore[no-untyped-call]
        self._marks = [_mark(x) for x in tensors]

    def matches(self, *tensors: Tensor) -> bool:
        """Whether these are the same, one by one."""
        return len(tensors) == len(self._marks) and all(
            storage.cdata == x.untyped_storage()._cdata and mark == _mark(x)
            for x, storage, mark in zip(tensors, self._storages, self._marks, strict=True)
        )


def _mark(x: Tensor) -> tuple[object, ...]:
    # A tensor of inference mode has no version, but it has no backward either.
    return x.shape, x.stride(), x.storage_offset(), None if x.is_inference() else x._version
