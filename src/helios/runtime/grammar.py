"""Constrained output: JSON schemas, regular expressions, choices and Lark grammars, through llguidance.

A grammar is compiled once, on a worker thread under a limit of size and time, and kept; every sequence
then has a cheap copy of its state. Before a token is sampled the matcher writes one bit per vocabulary id,
afterwards it takes the token. A complete output leaves nothing but the end tokens.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeGuard, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from helios.errors import InvalidRequestError
from helios.runtime.request import Grammar

CACHED_GRAMMARS = 256
# Between two JSON tokens, if anything: one space, or a new line and its indentation. Bounded, because a weak model
# can write white space until its tokens run out.
JSON_WHITESPACE = r"(\x20|\x0D?\x0A[\x20\x09]{0,32})"
_NOUNS = {
    "json_schema": "the JSON schema",
    "json_object": "the JSON object grammar",
    "regex": "the regular expression",
    "choice": "the choice",
    "lark": "the Lark grammar",
}


class GrammarMatcher:
    """One sequence's position in its grammar. Used by the engine's thread only.

    With ``starts_after`` everything is allowed until that token has been seen. The position depends on
    the accepted tokens alone, so a sequence that is put back and resumed keeps its matcher.
    """

    __slots__ = ("_matcher", "_starts_after")

    def __init__(self, matcher: LLMatcher, starts_after: int | None) -> None:
        self._matcher = matcher
        self._starts_after = starts_after

    def fill_mask(self, words: NDArray[np.int32]) -> None:
        """Write the tokens that may come next: bit ``i % 32`` of word ``i // 32`` is token ``i``. The array
        is one contiguous row of ``ceil(vocabulary / 32)`` words. When the grammar has failed no token is
        allowed and ``error`` says why."""
        if self._starts_after is not None:
            words.fill(-1)
            return
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words.fill(0)

    def accept(self, token_id: int) -> bool:
        """Move past a token of the output; false when the grammar does not allow it (then ``error``)."""
        if self._starts_after is not None:
            if token_id == self._starts_after:
                self._starts_after = None
            return True
        return self._matcher.consume_token(token_id)

    @property
    def is_finished(self) -> bool:
        """The output is complete: only an end token may follow."""
        return self._starts_after is None and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on: a token that it does not allow, or a limit on its complexity that
        was passed while the output grew."""
        return _explain(self._matcher.get_error()) if self._matcher.is_error() else None


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar in its initial state, shared by the sequences that use it."""

    prototype: LLMatcher

    def matcher(self, starts_after: int | None = None) -> GrammarMatcher:
        """State for a new sequence; takes about a microsecond."""
        return GrammarMatcher(self.prototype.deep_copy(), starts_after)


class GrammarCompiler:
    """Compiles grammars over one tokenizer. All methods may be called from any thread but the event loop's.

    ``vocabulary_size`` is the width of the logits; ``eos_ids`` are the tokens that may end an output.
    ``max_bytes`` bounds a grammar's text, ``time_limit_seconds`` its compilation, waiting for one of two
    workers included. llguidance cannot be interrupted, but its own limits end what was given up.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary_size: int,
        eos_ids: Sequence[int],
        *,
        time_limit_seconds: float = 5.0,
        max_bytes: int = 1 << 18,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._eos_ids = list(eos_ids)
        self._time_limit_seconds = time_limit_seconds
        self._max_bytes = max_bytes
        self._prepared: LLTokenizer | None = None
        self._prepare_lock = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="grammar")
        # A lexer state takes 1 to 2 kB: at most some 100 MB for one grammar. Errors without the parser's
        # state, which would put pieces of the output into them.
        self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

    def prepare(self) -> LLTokenizer:
        """Index the vocabulary, once: 1.5 s for Qwen's. The first ``compile`` does it when nobody has."""
        with self._prepare_lock:
            if self._prepared is None:
                self._prepared = LLTokenizer(
                    self._tokenizer.to_str(), n_vocab=self._vocabulary_size, eos_token=self._eos_ids
                )
            return self._prepared

    def compile(self, grammar: Grammar, param: str = "response_format") -> CompiledGrammar:
        """The compiled form of ``grammar``; blocks for milliseconds, at most the time limit.

        Raises InvalidRequestError naming ``param``, and the keyword or the place at fault, for a grammar
        that is malformed, too large, too slow or uses what is not supported.
        """
        key = (grammar.kind, grammar.text)
        with self._cache_lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        noun = _NOUNS.get(grammar.kind, "the grammar")
        size = len(grammar.text.encode(errors="replace"))
        if size > self._max_bytes:
            raise InvalidRequestError(
                f"{noun} has {size} bytes; the limit is {self._max_bytes}",
                param=param,
                code="grammar_too_large",
            )
        self.prepare()
        job = self._workers.submit(self._build, grammar)
        try:
            matcher = job.result(self._time_limit_seconds)
        except TimeoutError:
            job.cancel()
            raise InvalidRequestError(
                f"{noun} took longer than {self._time_limit_seconds:g} seconds to compile",
                param=param,
                code="grammar_too_complex",
            ) from None
        except RecursionError:
            raise InvalidRequestError(f"{noun} is nested too deeply", param=param) from None
        except ValueError as error:
            raise InvalidRequestError(f"{noun} is not valid: {error}", param=param) from None
        if matcher.is_error():
            raise InvalidRequestError(f"{noun} cannot be used: {_explain(matcher.get_error())}", param=param)
        compiled = CompiledGrammar(matcher)
        with self._cache_lock:
            self._compiled[key] = compiled
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return compiled

    def close(self) -> None:
        """Let the workers end."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _build(self, grammar: Grammar) -> LLMatcher:
        return LLMatcher(self.prepare(), _source(grammar), log_level=0, limits=self._limits)


def _source(grammar: Grammar) -> str:
    """``grammar`` in llguidance's own notation. Raises ValueError with what is wrong."""
    match grammar.kind:
        case "json_schema":
            return _json_source(grammar.text)
        case "json_object":
            return _json_source('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)
        case "choice":
            choices = json.loads(grammar.text)
            if not _is_choice(choices):
                raise ValueError("it must be a list of one or more strings, none of them empty")
            # A Lark string is written as a JSON string.
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
        case kind:
            raise ValueError(f"its kind {kind!r} is not known")


def _is_choice(value: object) -> TypeGuard[list[str]]:
    entries = cast("list[object]", value) if isinstance(value, list) else []
    return bool(entries) and all(isinstance(entry, str) and entry for entry in entries)


def _json_source(schema: str) -> str:
    if not isinstance(json.loads(schema), dict):
        raise ValueError("it must be a JSON object")
    # Overrides win over an "x-guidance" entry in the client's schema.
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"lenient": False, "whitespace_pattern": JSON_WHITESPACE}
    )


def _explain(error: str) -> str:
    """llguidance's message as one line that names the keyword or the fault."""
    unknown = re.match(r"Unimplemented keys: (\[.*\])", error)
    if unknown:
        keywords = cast("list[str]", json.loads(unknown[1]))
        return "unsupported keyword " + ", ".join(f"'{keyword}'" for keyword in keywords)
    broken = re.search(r"regex parse error:\n\s*(.*)\n[^$]*?error: (.*)", error)
    if broken:
        return f"the regular expression {broken[1]!r} is not supported: {broken[2]}"
    # The rest shows the source around the place.
    return " ".join(error.split("\n   1 |")[0].removesuffix("<non-verbose/>").split())
