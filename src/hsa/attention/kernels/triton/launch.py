"""Custom operators and kernel launches with little overhead.

PyTorch takes about a hundred microseconds to dispatch a custom operator, and Triton some tens to launch a kernel; the
kernels take about as long themselves. So operators are called directly unless they are traced, and compiled kernels are
looked up by the few properties of their arguments that Triton specialises on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hsa.attention.derivatives import first_order
from hsa.attention.kernels.triton.recording import INTERPRETED as INTERPRETED
from hsa.attention.kernels.triton.recording import STATE, Launch


class Operator:
    """A function of tensors and numbers, registered as the custom operator `hsa::name`.

    Args:
        name: Name of the custom operator.
        forward: Function that returns a tensor, or a tuple of tensors with only the first one differentiable.
        fake: Function with the same signature that returns empty tensors of the right shapes.
        save: Setup of the autograd context, as for `torch.library.register_autograd`; None for no gradient.
        gradients: Backward function, as for `torch.library.register_autograd`; None for no gradient.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        save: Callable[..., None] | None = None,
        gradients: Callable[..., Any] | None = None,
    ):
        self.forward = forward
        self.traced = torch.library.custom_op(f"hsa::{name}", forward, mutates_args=())
        self.traced.register_fake(fake)
        self.direct: Callable[..., Any] = forward
        if gradients is not None and save is not None:
            self.traced.register_autograd(gradients, setup_context=save)
            once = first_order(gradients)
            members = {"forward": forward, "setup_context": _first_only(save), "backward": once}
            function = type(name, (torch.autograd.Function,), {k: staticmethod(f) for k, f in members.items()})
            self.direct = function.apply  # type: ignore[attr-defined]

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return self.traced(*arguments)
        return self.direct(*arguments) if torch.is_grad_enabled() else self.forward(*arguments)


def _first_only(save: Callable[..., None]) -> Callable[..., None]:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, tuple):
            ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)

    return setup


def last_stride_1(x: Tensor) -> Tensor:
    """Return `x`, copied if its last dimension is not contiguous: kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Launcher:
    """A kernel with a cache of its compiled versions: `launcher(key, programs, arguments, constants)`.

    Args of a call:
        key: Properties of the arguments that Triton specialises on; see `compiled_for`.
        programs: Number of programs.
        arguments: All arguments that are not compile-time constants, in order.
        constants: Compile-time constants by name, and options such as num_warps.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.compiled: dict[Any, Any] = {}
        self.num_constants = 0 if INTERPRETED else sum(p.is_constexpr for p in kernel.params)

    def __call__(self, key: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """Launch the kernel, and return its compiled version; None in the interpreter."""
        if INTERPRETED:
            options = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
            kept = {name: value for name, value in constants.items() if name not in options}
            self.kernel[(programs,)](*arguments, **kept)
            self._note(None, programs, arguments, kept)
            return None
        key = key, *constants.values(), torch.cuda.current_device()
        compiled = self.compiled.get(key)
        if compiled is None:
            compiled = self.compiled[key] = self.kernel[(programs,)](*arguments, **constants)
        else:
            compiled[(programs, 1, 1)](*arguments, *[None] * self.num_constants)
        self._note(compiled, programs, arguments, {})
        return compiled

    def _note(self, compiled: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        """Add a launch to the recording, if there is one."""
        if STATE.recording is not None:
            arguments = arguments if INTERPRETED else (*arguments, *[None] * self.num_constants)
            STATE.recording.launches.append(Launch(compiled, programs, arguments, self.kernel, constants))


class Prepared:
    """A launch whose key and constants are known: `prepared(programs, arguments)`, which takes the least time.

    Operators keep one for each layout of their inputs. Layouts share the compiled kernels of the launcher.
    """

    def __init__(self, launcher: Launcher, key: Any, constants: dict[str, Any]):
        self.launcher, self.key, self.constants = launcher, key, constants
        self.compiled: Any = None

    def __call__(self, programs: int, arguments: tuple[Any, ...]) -> None:
        if self.compiled is None or STATE.recording is not None:
            self.compiled = self.launcher(self.key, programs, arguments, self.constants)
        else:
            self.compiled[(programs, 1, 1)](*arguments, *[None] * self.launcher.num_constants)


def compiled_for(*arguments: Any) -> tuple[Any, ...]:
    """Return the properties of arguments that Triton specialises kernels on."""
    return tuple(
        (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, Tensor) else (x == 1, x % 16 == 0, x >= 2**31)
        for x in arguments
    )
