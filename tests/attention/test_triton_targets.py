"""The kernels compile for the GPUs that are said to run them; no GPU is needed for that."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hsa.attention.triton import sweeps

TABLES = ("parent_ptr", "count_ptr", "up_count_ptr", "begin_ptr", "end_ptr", "bundle_ptr")
WIDTHS = {"D": 64, "DV": 64, "P": 0, "BLOCK_D": 64, "BLOCK_DV": 64, "BLOCK_P": 16, "PRECISION": "tf32"}
FLAGS = {"INCLUDE_SELF": False, "CAUSAL": False, "LEAVES": True, "SINGLE": True, "FULL": False, "GROUPS": 2, "SIZE": 16}
for capability in (80, 90):
    for kernel, more in ((sweeps.up, {}), (sweeps.down, {"ROWS": 32}), (sweeps.d_up, {})):
        constants = {**WIDTHS, **FLAGS, **more, "OVERLAP": capability >= 90}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        kinds = {"scale": "fp32", "plane": "i64", **dict.fromkeys(TABLES, "*i32"), **dict.fromkeys(constants, "constexpr")}
        signature = {n: kinds.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 2})
        assert compiled.metadata.shared < 99 * 2**10, compiled.metadata.shared
print("compiled")
"""


def test_sweeps_compile_for_ampere_and_hopper(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = tmp_path / "compile_kernels.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout.strip() == "compiled", run.stderr
