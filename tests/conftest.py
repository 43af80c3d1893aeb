"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from helios.runtime.detokenizer import Vocabulary

# Before anything imports Triton: without a GPU its kernels are tested in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell that starts the tests in the background makes them, and what they start, ignore interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
STRUCTURAL = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def byte_tokenizer(size: int = 512) -> Tokenizer:
    """A byte-level tokenizer without merges: 256 bytes, Qwen's special tokens, then fillers up to ``size``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in STRUCTURAL])
    tokenizer.add_tokens([f"<w{index}>" for index in range(size - tokenizer.get_vocab_size())])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)
