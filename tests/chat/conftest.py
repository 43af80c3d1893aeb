"""The demo model's tokenizer and template (the official Qwen3 one), ours and transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import helios
from helios.runtime.chat import ChatTemplate, load_chat_template
from helios.runtime.prompt_encoder import PromptEncoder, control_tokens

DEMO = Path(helios.__file__).parent / "demo_model"


@pytest.fixture(scope="session")
def reference() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="session")
def template(demo_tokenizer: Tokenizer) -> ChatTemplate:
    loaded = load_chat_template(DEMO, control_tokens(demo_tokenizer))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def encoder(demo_tokenizer: Tokenizer) -> PromptEncoder:
    return PromptEncoder(demo_tokenizer, 4096)
