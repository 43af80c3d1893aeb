"""Helios: a small, fast, readable inference server for Qwen3 language models."""

__version__ = "0.1.0"
