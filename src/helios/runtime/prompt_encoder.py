"""Text to token ids, without letting a caller's text become control tokens.

A chat prompt is scaffolding written by the template around strings written by the caller. Where the
caller's strings hold the text of a control token (``<|im_end|>``), the template marked it
(:class:`helios.runtime.chat.ControlTokenMarks`); here the unmarked ones become their ids and the marked
ones are encoded as the plain characters that they are. A prompt without marks goes through the tokenizer
in one call, so ordinary dialogues have exactly the ids that Hugging Face gives.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from helios.errors import ContextLengthError
from helios.runtime.chat import RenderedChat
from helios.runtime.detokenizer import Vocabulary


@dataclass(frozen=True, slots=True)
class StructuralTokens:
    """Ids of the tokens that give an answer its structure; None where the tokenizer lacks one."""

    think: int | None
    think_end: int | None
    tool_call: int | None
    tool_call_end: int | None
    turn_start: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> StructuralTokens:
        """Look the tokens up by their Qwen names."""
        find = tokenizer.token_to_id
        return cls(
            find("<think>"),
            find("</think>"),
            find("<tool_call>"),
            find("</tool_call>"),
            find("<|im_start|>"),
        )


def control_tokens(tokenizer: Tokenizer) -> dict[str, bool]:
    """Text of every added token, with whether it is a special one."""
    return {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}


class PromptEncoder:
    """Encodes prompts for one model. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, max_model_len: int, vocabulary: Vocabulary | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary or Vocabulary(tokenizer)
        self.max_model_len = max_model_len
        self.structural = StructuralTokens.of(tokenizer)
        texts = self.vocabulary.texts(skip_special_tokens=True)
        # How many characters each structural token takes in an output.
        self.marker_lengths = {id_: len(texts[id_] or "") for id_ in self.vocabulary.marker_ids.values()}
        self._ids = {token.content: id_ for id_, token in tokenizer.get_added_tokens_decoder().items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._control = "|".join(map(re.escape, longest_first)) or "(?!)"
        # The same model without its added tokens: whatever it is given, it writes no control token.
        self._plain = Tokenizer(tokenizer.model)
        if tokenizer.normalizer is not None:
            self._plain.normalizer = tokenizer.normalizer
        if tokenizer.pre_tokenizer is not None:
            self._plain.pre_tokenizer = tokenizer.pre_tokenizer

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    @cached_property
    def _splits_words(self) -> bool:
        """Whether no token spans two words, as with every byte-level BPE of this family."""
        if self.tokenizer.pre_tokenizer is None:
            return False
        spans = re.compile(r"[^Ġ▁\s][Ġ▁\s]+[^Ġ▁\s]")
        return not any(spans.search(token) for token in self.tokenizer.get_vocab() if token not in self._ids)

    def check_characters(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit before spending tokenizer time on it.

        A text has at least one token per word and per ``longest token`` characters (a quarter of that for
        text that Unicode normalization may shorten). Raises ContextLengthError.
        """
        if len(text) <= self.max_model_len:
            return
        shrink = 1 if text.isascii() else 4
        fewest = math.ceil(len(text) / (self._longest_token * shrink))
        if fewest <= self.max_model_len and self._splits_words:
            fewest = max(fewest, len(text.split()))
        if fewest > self.max_model_len:
            raise context_error(self.max_model_len, f"at least {fewest}", param)

    def encode_text(self, text: str, param: str = "prompt") -> list[int]:
        """Encode raw text; the texts of control tokens in it are control tokens, as a completion needs."""
        self.check_characters(text, param)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(self, chat: RenderedChat, param: str = "messages") -> list[int]:
        """Encode a rendered chat, keeping control tokens in the caller's strings literal."""
        self.check_characters(chat.text, param)
        if chat.marks is None:
            return self.tokenizer.encode(chat.text, add_special_tokens=False).ids
        before, after = re.escape(chat.marks.before), re.escape(chat.marks.after)
        scaffold = re.compile(f"(?<!{before})({self._control})(?!{after})")
        ids: list[int] = []
        for position, piece in enumerate(scaffold.split(chat.text)):
            if position % 2:
                ids.append(self._ids[piece])
            elif piece := chat.marks.strip(piece):
                ids.extend(self._plain.encode(piece, add_special_tokens=False).ids)
        return ids

    def starts_in_thinking(self, ids: list[int]) -> bool:
        """Whether a prompt's last turn has opened a think block and not closed it."""
        tokens = self.structural
        if tokens.think is None or tokens.think not in ids:  # the search in C: long prompts rarely hold one
            return False
        for token in reversed(ids):
            if token == tokens.think:
                return True
            if token in (tokens.think_end, tokens.turn_start):
                return False
        return False

    def token_text(self, token_id: int) -> str:
        """One token as text for reports; bytes that are no whole character are written ``bytes:\\xe2``."""
        raw = self.vocabulary.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def context_error(max_model_len: int, tokens: str, param: str) -> ContextLengthError:
    """The error for a prompt that leaves no room for an answer. ``tokens`` may read "at least N"."""
    noun = "messages" if param == "messages" else "prompt"
    return ContextLengthError(
        f"This model's maximum context length is {max_model_len} tokens. However, your {noun} resulted in "
        f"{tokens} tokens. Please reduce the length of the {noun}.",
        param=param,
    )
