"""Text of a token stream: equal to the tokenizer's, whole characters only, stop strings never leak."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from helios.errors import StartupError
from helios.runtime.detokenizer import Detokenizer, Vocabulary

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
STRUCTURE = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
ODD = [" two words ", "naïve", "Ġquoted"]  # added tokens whose text is not, or only looks, byte-level
WORDS = ["ab", "abc", "bc", "ĠSTOP", "ST", "OP", "Ã©", "ðŁ", "ĺĢ", "æĹ", "çļĦ", "äºº", "ĊĊ", "END"]


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE in Qwen's form: 256 bytes, some words, then added tokens, of which three are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*STRUCTURE, *ODD)])
    return tokenizer


TOKENIZER = build_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
BYTES = {VOCABULARY.token_bytes(token_id): token_id for token_id in range(VOCABULARY.size)}
IDS = st.lists(st.integers(0, VOCABULARY.size - 1) | st.integers(VOCABULARY.size - 30, VOCABULARY.size + 3))


def ids_of(*pieces: str | bytes) -> list[int]:
    return [BYTES[piece.encode() if isinstance(piece, str) else piece] for piece in pieces]


def run(token_ids: list[int], stop: tuple[str, ...] = (), **options: object) -> tuple[list[str], str | None]:
    """What is sent after each token (and at the end), and the stop string that ended it."""
    detokenizer = Detokenizer(VOCABULARY, stop, **options)  # type: ignore[arg-type]
    sent: list[str] = []
    for token_id in token_ids:
        text, matched = detokenizer.push(token_id)
        sent.append(text)
        if matched is not None:
            break
    else:
        matched = None
        sent.append(detokenizer.flush())
    assert detokenizer.text == "".join(sent)
    assert detokenizer.text_length == len(detokenizer.text)
    return sent, matched


@settings(max_examples=250, deadline=None)
@given(ids=IDS, skip=st.booleans(), stop=st.sampled_from([(), ("ab" + "\0" * 9, "\ufffd" + "\0" * 9)]))
def test_text_equals_the_tokenizers(ids: list[int], skip: bool, stop: tuple[str, ...]) -> None:
    """Any ids: broken UTF-8, special tokens between the bytes of a character, ids out of range."""
    expected = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert "".join(run(ids, stop, skip_special_tokens=skip)[0]) == expected
    assert VOCABULARY.decode(ids, skip) == expected


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=24))
def test_broken_utf8_is_replaced_as_the_tokenizer_does(data: bytes) -> None:
    """Byte tokens one at a time: each maximal bad run is one U+FFFD, at the same place."""
    ids = [BYTES[bytes([byte])] for byte in data]
    assert "".join(run(ids)[0]) == TOKENIZER.decode(ids) == data.decode(errors="replace")


def test_every_byte_and_added_token_has_its_bytes() -> None:
    """The alphabet is reversed completely, and added tokens decode as the tokenizer decodes them."""
    assert {VOCABULARY.token_bytes(token_id) for token_id in range(256)} == {bytes([b]) for b in range(256)}
    for token_id in range(256, VOCABULARY.size):
        text = TOKENIZER.decode([token_id], skip_special_tokens=False)
        assert VOCABULARY.token_bytes(token_id).decode(errors="replace") == text
    assert VOCABULARY.token_bytes(-1) == VOCABULARY.token_bytes(VOCABULARY.size) == b""
    assert list(VOCABULARY.marker_ids) == ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    assert [VOCABULARY.is_special(i) for i in ids_of(*SPECIAL, *STRUCTURE)] == [True] * 3 + [False] * 4


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    """SentencePiece-style pieces would otherwise turn into wrong text without a word."""
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(StartupError, match="Metaspace"):
        Vocabulary(tokenizer)


def test_a_character_is_sent_whole() -> None:
    """An emoji in two tokens: nothing after the first half, all of it after the second."""
    ids = ids_of(b"\xf0\x9f", b"\x98\x80", "ab")
    assert run(ids)[0] == ["", "😀", "ab", ""]
    assert run(ids[:1])[0] == ["", "�"]


def test_no_part_of_a_stop_string_is_sent() -> None:
    """Case: the start of a stop string leaked because it came in its own token."""
    assert run(ids_of("ab", " STOP", "END"), (" STOPEND",)) == (["ab", "", ""], " STOPEND")
    assert run(ids_of("a", "b", "c", "S"), ("bcd",)) == (["a", "", "", "bcS", ""], None)
    assert run(ids_of("a", "b", "c"), ("bcd",)) == (["a", "", "", "bc"], None)


def test_the_stop_string_is_kept_on_request_and_the_rest_of_its_token_is_dropped() -> None:
    assert run(ids_of("abc"), ("b",)) == (["a"], "b")
    assert run(ids_of("abc"), ("b",), include_stop=True) == (["ab"], "b")
    assert run(ids_of("a", "END"), ("aE",), include_stop=True) == (["", "aE"], "aE")


def test_a_stop_string_may_span_marker_and_special_tokens() -> None:
    """Special tokens have no text when skipped, so what stands around them is adjacent."""
    ids = ids_of("a", "<|im_end|>", "b")
    assert run(ids, ("ab",)) == (["", "", ""], "ab")
    assert run(ids, ("ab",), skip_special_tokens=False)[1] is None
    assert run(ids, ("d|>b",), skip_special_tokens=False) == (["a", "<|im_en", ""], "d|>b")
    assert run(ids_of("ab", "</think>", "ab"), ("b</think>a",)) == (["a", "", ""], "b</think>a")


def reference_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The definition: read character by character, end at the first that completes a stop string."""
    for end in range(1, len(text) + 1):
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=250, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["a", "b", "c", "ab", "abc", "bc", "ST", "OP", " STOP"]), max_size=14),
    stop=st.lists(st.text("abcSTOP ", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
)
def test_stop_strings_do_not_depend_on_token_borders(pieces: list[str], stop: tuple[str, ...]) -> None:
    """Several overlapping stop strings over any split into tokens, against the definition; and what is
    sent on the way is never taken back."""
    sent, matched = run(ids_of(*pieces), stop)
    assert ("".join(sent), matched) == reference_stop("".join(pieces), stop)


@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from(["a", "b", "ab", "abc", "ST"]), max_size=10))
def test_text_is_held_no_longer_than_needed(pieces: list[str]) -> None:
    """After each token what is unsent must itself begin a stop string; otherwise a stream stalls."""
    stop = ("abcab", "STab")
    detokenizer = Detokenizer(VOCABULARY, stop)
    for token_id, so_far in zip(ids_of(*pieces), itertools.accumulate(pieces), strict=True):
        if detokenizer.push(token_id)[1] is not None:
            break
        held = so_far[len(detokenizer.text) :]
        assert any(string.startswith(held) for string in stop)


def test_stop_strings_count_only_after_min_tokens() -> None:
    """min_tokens holds off stop strings as it holds off end tokens; a later match still ends the text."""
    ids = ids_of("a", "b", "c", "a", "b")
    assert run(ids, ("ab",), min_tokens=2) == (["", "ab", "c", "", ""], "ab")
    assert run(ids, ("ab",), min_tokens=5)[1] is None
    assert run(ids, ("bc",), min_tokens=2) == (["a", "", ""], "bc")


def test_markers_carry_their_offset_in_the_text() -> None:
    """The reasoning and tool parsers cut the text at these offsets, also while it is still held."""
    detokenizer = Detokenizer(VOCABULARY, ("zz",))
    ids = ids_of("<think>", "ab", "z", b"\xf0\x9f", "</think>", "c")
    for token_id in ids[:2]:
        detokenizer.push(token_id)
    assert detokenizer.take_markers() == ((0, ids[0]),)
    assert detokenizer.take_markers() == ()
    assert detokenizer.push(ids[2]) == ("", None)
    assert detokenizer.push(ids[3]) == ("", None)
    assert detokenizer.push(ids[4]) == ("z�</think>", None)
    assert detokenizer.take_markers() == ((len("<think>abz�"), ids[4]),)
    detokenizer.push(ids[5])
    assert detokenizer.text == "<think>abz�</think>c" == TOKENIZER.decode(ids)


def test_a_marker_beyond_the_end_of_the_text_is_not_reported() -> None:
    """A stop string that is the marker itself removes it from the answer."""
    detokenizer = Detokenizer(VOCABULARY, ("</think>",))
    ids = ids_of("<think>", "ab", "</think>")
    assert [detokenizer.push(token_id) for token_id in ids] == [
        ("<think>", None),
        ("ab", None),
        ("", "</think>"),
    ]
    assert detokenizer.take_markers() == ((0, ids[0]),)
    assert detokenizer.text_length == len("<think>ab")
