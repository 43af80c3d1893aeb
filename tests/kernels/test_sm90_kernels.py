"""The kernels for SM90 on any machine: compiled for that card, and their machine code looked at.

What they compute is tested on a card, since nothing else runs it. Compiled in a process of its own: the
interpreter, which the other tests switch on, is no compiler.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
gluon = pytest.importorskip("triton.experimental.gluon")

COMPILE = """
import pathlib, sys, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

def descriptor(lines, columns):
    return f"tensordesc<bf16[{lines}, {columns}],{gl.NVMMASharedLayout(128, 16, rank=2)!r}>"

def build(kernel, types, aligned, constants, name, **options):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})
    pathlib.Path(sys.argv[1], name).write_bytes(compiled.asm["cubin"])
    print(name, compiled.metadata.shared)
"""
PREFILL = """
from helios.kernels import prefill_hopper as home
pages = descriptor(home.CONFIG.block_n, 128)
types = {"q": "*bf16", "keys": pages, "values": pages, "out": "*bf16", "scale": "fp32"}
types |= dict.fromkeys(("page_table", "kv_lengths", "cu_q", "counters"), "*i32")
types |= dict.fromkeys(("part_values", "part_stats"), "*fp32")
aligned = ("q", "out", "part_values", "part_stats", "q_token_stride", "q_head_stride")
constants = dict(
    PAGE=256, HEADS=32, GROUP=4, PACK=4, HEAD_DIM=128, M=home.CONFIG.block_m, N=home.CONFIG.block_n,
    STAGES=home.CONFIG.num_stages, ROWS_PAD=32, REGISTERS=home.CONSUMER_REGISTERS,
    PRODUCER_REGISTERS=home.PRODUCER_REGISTERS, PDL=True,
)
build(home.prefill_sm90_kernel, types, aligned, constants, "prefill")
"""
LINEAR = """
from helios.kernels import linear_hopper as home
from helios.kernels.linear_table import candidates
for variant in {v for rows in (8, 32) for v in candidates(rows, sm90=True) if v.kind == "stream" and not v.half}:
    for gated in (False, True):
        types = {"x": descriptor(variant.pad, 128), "weight": descriptor(64, 128), "parts": "*fp32", "counters": "*i32"}
        types |= dict.fromkeys(("bias", "residual", "out"), "*bf16")
        aligned = ("bias", "residual", "out", "parts", "counters", "n_out", "k_size")
        constants = dict(
            PAD=variant.pad, BLOCK_N=variant.block_n * (1 + gated), BLOCK_K=home.BLOCK_K, LINES=home.LINES,
            STAGES=variant.num_stages // (1 + gated), GATED=gated, PDL=True,
        )
        build(home.linear_sm90_kernel, types, aligned, constants, f"{variant}{' gated' * gated}")
"""

DECODE = """
from helios.kernels import decode_hopper as home
pages = descriptor(home.TILE, 128)
types = {"q": "*bf16", "keys": pages, "values": pages, "out": "*bf16", "scale": "fp32"}
types |= dict.fromkeys(("page_table", "kv_lengths", "counters"), "*i32")
types |= dict.fromkeys(("part_values", "part_stats"), "*fp32")
aligned = ("q", "out", "part_values", "part_stats", "counters", "q_row_stride", "q_head_stride")
constants = dict(
    PAGE=256, KV_HEADS=8, GROUP=4, HEAD_DIM=128, TILE=home.TILE, STAGES=home.STAGES, ROWS_PAD=32,
    QUERY_ROWS=home.QUERY_ROWS, LEAST_TILES=1, FETCH_REGISTERS=home.FETCH_REGISTERS, PDL=True,
)
build(home.decode_sm90_kernel, types, aligned, constants, "decode", maxnreg=home.REGISTERS)
"""


@dataclass(frozen=True)
class Compiled:
    """Shared memory of a kernel's program, and its machine code as text."""

    shared: int
    code: str


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    """All forms by name, compiled for SM90."""
    folder = tmp_path_factory.mktemp("sm90")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE + PREFILL + LINEAR + DECODE, str(folder)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.exists():
        pytest.skip("this Triton comes without nvdisasm")
    found: dict[str, Compiled] = {}
    for line in run.stdout.splitlines():
        name, shared = line.rsplit(" ", 1)
        shown = subprocess.run([str(tool), str(folder / name)], capture_output=True, text=True, check=True)
        found[name] = Compiled(int(shared), shown.stdout)
    return found


def test_softmax_runs_beside_the_product(compiled: dict[str, Compiled]) -> None:
    """The assembler may move the wait for a product up, before the exponentials that should hide its time: the
    answer stays right and a fifth of the speed is lost. And the main loop keeps its values in registers."""
    code = compiled["prefill"].code
    assert compiled["prefill"].shared <= 227 << 10
    between = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", code, re.DOTALL)
    assert len(between) == 4, "a loop with a mask and one without, for each of the two groups"
    assert all(part.count("MUFU.EX2") >= 64 for part in between)
    loops = re.findall(r"HGMMA[^\n]*RZ, !UPT(?:(?!RZ, !UPT).)*?DEPBAR\.LE gsb0, 0x1", code, re.DOTALL)
    without_mask = min(loops, key=len)
    assert "STL" not in without_mask
    assert "LDL" not in without_mask


def test_weights_are_asked_for_before_the_kernel_before_has_ended(compiled: dict[str, Compiled]) -> None:
    """Behind the wait for its predecessor the ring would stay empty while that one runs. Also: all forms that
    start-up tries compile, fit into shared memory, and keep their values in registers."""
    forms = {name: form for name, form in compiled.items() if name.startswith("stream")}
    assert len(forms) == 6
    for name, form in forms.items():
        assert "UTMALDG" in form.code[: form.code.index("ACQBULK")], name
        assert "STL" not in form.code, name
        assert form.shared <= 227 << 10, name


def test_decode_attention_fits_twice_into_a_multiprocessor(compiled: dict[str, Compiled]) -> None:
    """One program at a time would wait whenever it starts a row. And nothing is kept outside the registers."""
    assert compiled["decode"].shared <= (228 << 10) // 2 - 1024
    assert "STL" not in compiled["decode"].code
