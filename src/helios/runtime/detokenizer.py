"""From token ids to text, one token at a time, without asking the tokenizer.

``Vocabulary`` is built once: it reverses the byte-level BPE alphabet, so that a token id is a list index
away from its bytes. ``Detokenizer`` is one sequence's state: bytes that do not yet form a character, and
text that may still turn out to be the beginning of a stop string. The text of a whole sequence equals
``tokenizer.decode`` of all its ids, character for character; the tests hold that for arbitrary ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders

from helios.errors import StartupError

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def _byte_alphabet() -> dict[int, str]:
    """Byte value → the character that byte-level BPE (GPT-2) writes for it: printable Latin-1 characters
    stand for themselves, the other 68 bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {byte: chr(byte) for byte in printable}
    alphabet.update((byte, chr(256 + index)) for index, byte in enumerate(others))
    return alphabet


def _translation() -> dict[int, int]:
    """Character → byte as a table for ``str.translate``. Latin-1 characters that are not in the alphabet
    go where no encoder to Latin-1 follows, which is how a token that is not byte-level shows itself."""
    table = dict.fromkeys(range(256), 0x10FFFF)
    table.update((ord(char), byte) for byte, char in _byte_alphabet().items())
    return table


class Vocabulary:
    """The bytes of every token id, and which ids are special.

    ``size`` is the number of ids of the tokenizer (the largest plus one); the model's embedding may be
    padded beyond it. ``marker_ids`` maps the content of the structural tokens to their ids, for those
    that the tokenizer has. Raises StartupError for a tokenizer that is not byte-level.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise StartupError(
                f"the tokenizer's decoder is {type(tokenizer.decoder).__name__}; Helios reads byte-level BPE "
                "tokenizers such as Qwen's"
            )
        tokens = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.size = 1 + max([*tokens.values(), *added])
        self.marker_ids = {marker: tokens[marker] for marker in MARKERS if marker in tokens}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

        self._bytes = [b""] * self.size
        translation = _translation()
        for token, token_id in tokens.items():
            try:
                self._bytes[token_id] = token.translate(translation).encode("latin-1")
            except UnicodeEncodeError:
                self._bytes[token_id] = token.encode()
        # Most tokens are whole characters, so their text needs no decoding when they arrive.
        self._texts = [_decoded_or_none(data) for data in self._bytes]
        self._texts_without_special = [
            "" if token_id in self.special_ids else text for token_id, text in enumerate(self._texts)
        ]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the tokenizer's range."""
        return self._bytes[token_id] if 0 <= token_id < self.size else b""

    def is_special(self, token_id: int) -> bool:
        """True for tokens that ``skip_special_tokens`` leaves out of the text."""
        return token_id in self.special_ids

    def texts(self, skip_special_tokens: bool) -> list[str | None]:
        """Token id → its text, or None where the token is not made of whole characters."""
        return self._texts_without_special if skip_special_tokens else self._texts

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a list of ids, equal to ``tokenizer.decode``."""
        special = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in special)
        return data.decode(errors="replace")


def _decoded_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class Detokenizer:
    """Text of one sequence as its tokens arrive.

    ``push`` returns what is safe to send: whole characters, and nothing that could still become part of a
    stop string. Of several stop strings the one that is complete first ends the text (of two that are
    complete at the same character, the longer one); so the result does not depend on how the text falls
    into tokens. A stop string that is complete within the first ``min_tokens`` tokens does not count.
    """

    __slots__ = (
        "_held",
        "_include_stop",
        "_marker_ids",
        "_markers",
        "_min_tokens",
        "_num_tokens",
        "_pending",
        "_pieces",
        "_stop",
        "_texts",
        "_vocabulary",
        "text_length",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._texts = vocabulary.texts(skip_special_tokens)
        self._marker_ids = frozenset(vocabulary.marker_ids.values())
        self._stop = tuple(string for string in stop if string)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pending = b""  # the first bytes of a character whose rest has not come
        self._held = ""  # the last characters of the text, which may begin a stop string
        self._pieces: list[str] = []  # what was released
        self._markers: list[tuple[int, int]] = []
        self.text_length = 0  # characters of the whole text, released or held

    @property
    def text(self) -> str:
        """Everything released so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def take_markers(self) -> tuple[tuple[int, int], ...]:
        """Structural tokens since the last call: (offset of their text in the whole text, token id). An
        offset may lie beyond the text released so far."""
        if not self._markers:
            return ()
        markers = tuple(self._markers)
        self._markers = []
        return markers

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Add one token. Returns the text that is now safe to send and, when the sequence ends here, the
        stop string that was met; nothing may be pushed after that."""
        self._num_tokens += 1
        text = self._texts[token_id] if 0 <= token_id < len(self._texts) else ""
        if text is None or (self._pending and text):
            text = self._decode(self._vocabulary.token_bytes(token_id))
        self.text_length += len(text)
        if token_id in self._marker_ids:
            marker = self._texts[token_id] or ""
            self._markers.append((self.text_length - len(marker), token_id))
        if self._stop and text:
            return self._match(text)
        if text:
            self._pieces.append(text)
        return text, None

    def flush(self) -> str:
        """What is left when the sequence ends otherwise: held text, then U+FFFD for an unfinished
        character."""
        rest = self._pending.decode(errors="replace")
        text = self._held + rest
        self.text_length += len(rest)
        self._pending, self._held = b"", ""
        if text:
            self._pieces.append(text)
        return text

    def _decode(self, data: bytes) -> str:
        data = self._pending + data
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return text

    def _match(self, new_text: str) -> tuple[str, str | None]:
        """Search ``new_text`` and what was held before it; release what can no longer begin a match."""
        tail = self._held + new_text
        if self._num_tokens > self._min_tokens:
            found = [
                (start + len(stop), start, stop) for stop in self._stop if (start := tail.find(stop)) >= 0
            ]
            if found:
                end, start, stop = min(found)
                return self._finish(tail, end if self._include_stop else start), stop
        keep = self._held_length(tail)
        released = tail[: len(tail) - keep]
        self._held = tail[len(tail) - keep :]
        if released:
            self._pieces.append(released)
        return released, None

    def _finish(self, tail: str, length: int) -> str:
        """Cut the text after ``length`` characters of ``tail``."""
        released = tail[:length]
        self.text_length -= len(tail) - length
        self._markers = [marker for marker in self._markers if marker[0] < self.text_length]
        self._pending, self._held = b"", ""
        if released:
            self._pieces.append(released)
        return released

    def _held_length(self, tail: str) -> int:
        """Length of the longest end of ``tail`` that begins a stop string and does not complete it."""
        longest = 0
        for stop in self._stop:
            start = tail.find(stop[0], max(0, len(tail) - len(stop) + 1))
            while start >= 0:
                if stop.startswith(tail[start:]):
                    longest = max(longest, len(tail) - start)
                    break
                start = tail.find(stop[0], start + 1)
        return longest
