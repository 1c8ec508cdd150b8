"""`Recording` and `Replay`: the launches of a call, repeated for other tensors of the same layout.

For small inputs the host takes longer to check arguments, to allocate memory and to launch kernels than a GPU takes to run
them. The launches of a call depend on the layout of its tensors only, so they are recorded once. A replay allocates the
memory of a call at once, and launches the same kernels with other addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

INTERPRETED: bool = triton.knobs.runtime.interpret
ALIGNMENT = 512
"""Multiple of bytes at which the parts of the memory of a replay begin."""


class _State(threading.local):
    recording: Recording | None = None


STATE = _State()


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory of a call, on the device of a tensor. A replay allocates it again."""
    x = like.new_empty(shape, dtype=dtype)
    if STATE.recording is not None:
        STATE.recording.memory.append(x)
    return x


def constant(x: Tensor) -> Tensor:
    """Return a tensor that all calls of the same layout share."""
    if STATE.recording is not None:
        STATE.recording.constants.append(x)
    return x


def recording_of(*inputs: Tensor) -> Recording:
    """Return a context in which launches are recorded. Inside another recording it is that one, which has these inputs."""
    return Recording(*inputs) if STATE.recording is None else STATE.recording


class Launch(NamedTuple):
    """A launch: compiled kernel, number of programs and arguments; the interpreter needs the kernel and its constants."""

    compiled: Any
    programs: int
    arguments: tuple[Any, ...]
    kernel: Any
    constants: dict[str, Any]


class Address(NamedTuple):
    """Address of an argument, relative to one of the tensors of a call: inputs, then outputs, then other memory."""

    argument: int
    tensor: int
    offset: int  # in bytes
    dtype: torch.dtype


class Recording:
    """A context in which the launches of a call are recorded.

    Args:
        inputs: Tensors that differ between calls.
    """

    def __init__(self, *inputs: Tensor):
        self.inputs = inputs
        self.memory: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.launches: list[Launch] = []
        self.outer: list[Recording | None] = []

    def __enter__(self) -> Recording:
        self.outer.append(STATE.recording)
        STATE.recording = self
        return self

    def __exit__(self, *_: object) -> None:
        STATE.recording = self.outer.pop()

    @property
    def nbytes(self) -> int:
        """Number of bytes of the memory that a replay allocates."""
        return sum(x.nbytes for x in self.memory)

    def replay(self, outputs: Sequence[Tensor]) -> Replay:
        """Return the replay of the recorded launches, which returns tensors like these outputs."""
        others = [x for x in self.memory if not any(_memory_of(x) == _memory_of(y) for y in outputs)]
        tensors = [*self.inputs, *outputs, *others]
        launches = []
        for launch in self.launches:
            arguments, addresses = list(launch.arguments), []
            for i, x in enumerate(launch.arguments):
                if isinstance(x, Tensor):
                    address = self._address(i, x, tensors)
                    arguments[i] = 0 if address else x if INTERPRETED else x.data_ptr()
                    addresses += [address] if address else []
            launches.append((launch._replace(arguments=tuple(arguments)), tuple(addresses)))
        return Replay(outputs, others, launches, self.constants)

    def _address(self, index: int, x: Tensor, tensors: Sequence[Tensor]) -> Address | None:
        """Return the address of an argument in a tensor of the call; None if it is constant."""
        if x.numel() == 0 or any(_memory_of(x) == _memory_of(y) for y in self.constants):
            return None
        filled = [(i, y) for i, y in enumerate(tensors) if y.numel()]
        same = [i for i, y in filled if x.data_ptr() == y.data_ptr()][:1]
        same = same or [i for i, y in filled if _memory_of(x) == _memory_of(y)]
        if len(same) != 1:
            raise AssertionError(f"argument {index} of a recorded launch is no part of one tensor of the call")
        return Address(index, same[0], x.data_ptr() - tensors[same[0]].data_ptr(), x.dtype)


def _memory_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Replay:
    """Recorded launches: `replay(*inputs)` runs them for other tensors, and returns new outputs.

    Inputs must have the shapes, strides and dtypes of the recorded ones, and start at multiples of 16 bytes if those did;
    two inputs are the same tensor if they were.
    """

    def __init__(
        self,
        outputs: Sequence[Tensor],
        others: Sequence[Tensor],
        launches: Sequence[tuple[Launch, tuple[Address, ...]]],
        constants: Sequence[Tensor],
    ):
        self.device, self.outputs = outputs[0].device, [(x.shape, x.dtype) for x in outputs]
        self.offsets, self.bytes = [], 0
        for x in others:
            self.offsets.append(self.bytes)
            self.bytes += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        self.launches, self.constants = launches, tuple(constants)  # constants must live as long as their addresses
        self._ready: list[tuple[Any, ...]] = []

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        outputs = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.outputs]
        memory = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        if INTERPRETED:
            self._interpret([*inputs, *outputs], memory)
            return outputs
        if not self._ready:
            self._ready = [
                (
                    x.compiled.run,
                    x.programs,
                    x.compiled.function,
                    x.compiled.packed_metadata,
                    list(x.arguments),
                    addresses,
                )
                for x, addresses in self.launches
            ]
        base = memory.data_ptr()
        bases = [x.data_ptr() for x in inputs]
        bases += [x.data_ptr() for x in outputs]
        bases += [base + offset for offset in self.offsets]
        stream = driver.active.get_current_stream(self.device.index)
        for run, programs, function, metadata, template, addresses in self._ready:
            arguments = template.copy()
            for index, tensor, offset, _ in addresses:
                arguments[index] = bases[tensor] + offset
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)
        return outputs

    def _interpret(self, tensors: list[Tensor], memory: Tensor) -> None:
        """Run the launches in Triton's interpreter, which takes tensors in place of addresses."""
        tensors = [*tensors, *(memory[offset:] for offset in self.offsets)]
        for launch, addresses in self.launches:
            arguments = list(launch.arguments)
            for index, number, offset, dtype in addresses:
                x = tensors[number]
                if offset or x.dtype != dtype:
                    x = x.view(-1).view(torch.uint8)[offset:]
                    x = x[: x.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
                arguments[index] = x
            launch.kernel[(launch.programs,)](*arguments, **launch.constants)
