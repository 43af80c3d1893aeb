"""The kernel for SM90 on any machine: compiled for that card, and its machine code looked at.

What it computes is tested in tests/gpu, since nothing but a card runs it. Compiled in a process of its own: the
interpreter, which the other tests switch on, is no compiler.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
gluon = pytest.importorskip("triton.experimental.gluon")

COMPILE = """
import pathlib, sys, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from helios.kernels import prefill_hopper as kernel

head_dim, heads = 128, 32
descriptor = f"tensordesc<bf16[{kernel.BLOCK_N}, {head_dim}],{gl.NVMMASharedLayout(128, 16, rank=2)!r}>"
types = {"q": "*bf16", "keys": descriptor, "values": descriptor, "out": "*bf16", "scale": "fp32"}
types |= dict.fromkeys(("page_table", "kv_lengths", "cu_q", "counters"), "*i32")
types |= dict.fromkeys(("part_values", "part_stats"), "*fp32")
constants = dict(
    PAGE=256, HEADS=heads, GROUP=4, PACK=4, HEAD_DIM=head_dim, M=kernel.BLOCK_M, N=kernel.BLOCK_N,
    STAGES=kernel.STAGES, ROWS_PAD=32, REGISTERS=kernel.CONSUMER_REGISTERS,
    PRODUCER_REGISTERS=kernel.PRODUCER_REGISTERS, PDL=True,
)
names = kernel.hopper_kernel.arg_names
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
aligned = ("q", "out", "part_values", "part_stats", "q_token_stride", "q_head_stride")
source = GluonASTSource(
    kernel.hopper_kernel,
    signature,
    {(names.index(name),): value for name, value in constants.items()},
    {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
pathlib.Path(sys.argv[1]).write_bytes(compiled.asm["cubin"])
print(compiled.metadata.shared)
"""


def test_softmax_runs_beside_the_product(tmp_path: Path) -> None:
    """The assembler may move the wait for a product up, before the exponentials that should hide its time: the
    answer stays right and a fifth of the speed is lost. Also: it fits into shared memory, and the main loop
    keeps its values in registers."""
    binaries = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not (binaries / "nvdisasm").exists():
        pytest.skip("this Triton comes without nvdisasm")
    binary = tmp_path / "kernel.cubin"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(binary)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) <= 227 << 10
    code = subprocess.run(
        [str(binaries / "nvdisasm"), str(binary)], capture_output=True, text=True, check=True
    ).stdout
    between = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", code, re.DOTALL)
    assert len(between) == 4, "a loop with a mask and one without, for each of the two groups"
    assert all(part.count("MUFU.EX2") >= 64 for part in between)
    loops = re.findall(r"HGMMA[^\n]*RZ, !UPT(?:(?!RZ, !UPT).)*?DEPBAR\.LE gsb0, 0x1", code, re.DOTALL)
    without_mask = min(loops, key=len)
    assert "STL" not in without_mask
    assert "LDL" not in without_mask
