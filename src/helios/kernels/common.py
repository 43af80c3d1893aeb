"""What the kernels share: an import of Triton that may fail, and the launch options.

Launch cost. Triton's launcher takes some 10 µs of Python for a call and compiles again whenever an integer
argument changes its kind (1, a multiple of 16, anything else), a pointer its alignment or a ``constexpr`` its
value. So the kernels take row and token counts from the grid and sizes of the model as ``constexpr``, and
what else may change between steps (strides that are row counts, pointers into packed buffers) is named in
``do_not_specialize`` and ``do_not_specialize_on_alignment``. A model needs one or two compiled forms of each
kernel, and a warm-up at one token and at many makes all of them. In a CUDA graph the launcher has no part.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, cast

import torch


def _load() -> tuple[Any, Any, Any]:
    try:
        triton = importlib.import_module("triton")
        language = importlib.import_module("triton.language")
        cuda = importlib.import_module("triton.language.extra.cuda")
    except ImportError:
        return None, None, None
    return triton, language, cuda


triton, tl, cuda = _load()
LOG2_E = 1.4426950408889634  # attention's scores are in powers of two: exp2 is one instruction
# Fixed here, when the kernels are defined: Triton looks at TRITON_INTERPRET once for each of them.
_INTERPRETED = triton is not None and bool(triton.knobs.runtime.interpret)


def available(device: torch.device) -> bool:
    """Whether the kernels run on ``device``: Triton is there, and an SM80 or later (or the interpreter)."""
    if triton is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and interpreted()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, as they do in the tests on a CPU."""
    return _INTERPRETED


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit``, with its options, or nothing where Triton is missing: the module then still imports."""
    if triton is None:
        return function or _unchanged
    return triton.jit(function, **options)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def constant(value: float) -> Any:
    """A module-level number that kernels may read."""
    return value if tl is None else tl.constexpr(value)


class _Switches:
    """What is switched on in this package, see :func:`use_pdl` and :func:`use_sm90`."""

    pdl = False
    sm90 = True


def use_pdl(enabled: bool, device: torch.device | None = None) -> bool:
    """Switch programmatic dependent launch on or off for later launches; returns what now holds.

    A kernel launched so may start while the one before it still runs. Each of ours first loads what no kernel of
    the step writes (weights), lets its successor start likewise, and then waits for its predecessor to end
    (``gdc_wait``): a chain of kernels gets ready while the first of them runs. It needs SM90; elsewhere it stays
    off. Set it before capturing.
    """
    _Switches.pdl = (
        enabled
        and cuda is not None
        and hasattr(cuda, "gdc_wait")
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
    return _Switches.pdl


def use_sm90(enabled: bool) -> None:
    """Switch the kernels that are written for SM90 on or off for later choices and launches."""
    _Switches.sm90 = enabled


def sm90_kernels(device: torch.device) -> bool:
    """Whether the kernels that are written for SM90 (H100, H200) serve on ``device``."""
    if not _Switches.sm90 or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        return importlib.util.find_spec("triton.experimental.gluon") is not None
    except ModuleNotFoundError:  # an older Triton, or none
        return False


def launch_options(num_warps: int) -> dict[str, Any]:
    """Keyword arguments of a launch: warps, the ``PDL`` constexpr and the attribute that goes with it."""
    pdl = _Switches.pdl
    options: dict[str, Any] = {"num_warps": num_warps, "PDL": pdl}
    return options | {"launch_pdl": True} if pdl else options


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    return cast(int, torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number`` (itself at least 1)."""
    return 1 << (number - 1).bit_length()
