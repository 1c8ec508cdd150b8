"""Triton's interpreter, patched for NumPy 2.4 and for speed. Tests of kernels use it on machines without a GPU."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter():
    """Patch two slow operations of the interpreter and an error.

    Sorting uses reductions by exclusive or, which the interpreter computes element by element. It patches Triton's language
    module whenever one kernel function calls another, although once is enough. A tensor as the bound of a loop is an array
    of one number, which NumPy 2.4 does not convert to an integer.
    """
    slow_reduce, patched = interpreter.ReduceOps.generic_reduce, set()
    patch_tensor = interpreter._patch_lang_tensor

    def reduce(self, arguments):
        if self.combine_fn != tl.standard._xor_combine:
            return slow_reduce(self, arguments)
        (x,) = arguments
        return self.to_tensor(np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype)

    def call(self, *args, **kwargs):
        names = self.fn.__globals__
        if names.get("tl") is not tl and id(names) not in patched:
            patched.add(id(names))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    def tensor_as_number(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda x: int(x.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)
            patch.setattr(interpreter.InterpretedFunction, "__call__", call)
            patch.setattr(interpreter, "_patch_lang_tensor", tensor_as_number)
        yield
