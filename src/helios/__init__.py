"""Helios: a small, fast, readable inference server for Qwen3 language models, and a library.

``from helios import LLM, AsyncLLM, SamplingParams``. Names are loaded when they are touched, so that
``import helios`` is cheap; only ``LLM`` and ``AsyncLLM`` need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from helios.async_llm import AsyncLLM
    from helios.errors import HeliosError, InvalidRequestError, RequestError, StartupError
    from helios.llm import LLM
    from helios.outputs import CompletionOutput, Delta, RequestOutput
    from helios.runtime.request import Grammar, SamplingParams, TokenLogprob

__version__ = "0.1.0"

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "SamplingParams": "runtime.request",
    "Grammar": "runtime.request",
    "TokenLogprob": "runtime.request",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Delta": "outputs",
    "HeliosError": "errors",
    "StartupError": "errors",
    "RequestError": "errors",
    "InvalidRequestError": "errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Delta",
    "Grammar",
    "HeliosError",
    "InvalidRequestError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StartupError",
    "TokenLogprob",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'helios' has no attribute {name!r}")
    value: object = getattr(import_module(f"helios.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
