"""Triton's interpreter, made to work with NumPy 2.4 and faster. Used by the tests of kernels where there is no GPU."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter():
    """What it does slowly and often, and what it gets wrong.

    Sorts are made of exclusive ors, which it reduces element by element. It prepares the language anew whenever one kernel
    function calls another; once is enough. And a tensor as the bound of a loop is an array of one number, which NumPy no
    longer takes for a number.
    """
    slow_reduce, prepared = interpreter.ReduceOps.generic_reduce, set()
    patch_tensor = interpreter._patch_lang_tensor

    def reduce(self, arguments):
        if self.combine_fn != tl.standard._xor_combine:
            return slow_reduce(self, arguments)
        (x,) = arguments
        return self.to_tensor(np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype)

    def call(self, *args, **kwargs):
        names = self.fn.__globals__
        if names.get("tl") is not tl and id(names) not in prepared:
            prepared.add(id(names))
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
