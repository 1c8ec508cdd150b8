"""`StepMemory`: the work memory of decoding steps, which caches whose steps run one after another can share."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Key = tuple[int, ...]


class StepMemory:
    """Tensors that a step writes before it reads them, by the sizes of the step."""

    def __init__(self) -> None:
        self._tensors: dict[Key, tuple[Tensor, ...]] = {}

    def get(self, key: Key, allocate: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return the tensors of steps of some sizes; the last size is the number of tokens.

        Tensors of other sizes are freed, except for those of steps that differ in the number of tokens alone.
        """
        if key not in self._tensors:
            self._tensors = {other: x for other, x in self._tensors.items() if other[:-1] == key[:-1]}
            self._tensors[key] = allocate()
        return self._tensors[key]

    def tensors(self) -> list[Tensor]:
        """Return all tensors. A CUDA graph of a step is valid as long as they live."""
        return [x for tensors in self._tensors.values() for x in tensors]

    @property
    def nbytes(self) -> int:
        """Number of bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors())
