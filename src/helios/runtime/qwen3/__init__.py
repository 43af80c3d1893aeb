"""Qwen3 (and Qwen2) dense models in plain PyTorch over a paged KV cache."""
