"""Constrained output: masks, bounded compilation, and messages that name what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from helios.errors import InvalidRequestError
from helios.runtime import grammar as grammar_module
from helios.runtime.grammar import CompiledGrammar, GrammarCompiler, GrammarMatcher
from helios.runtime.request import Grammar

VOCABULARY_SIZE = 320  # wider than the tokenizer, like Qwen's logits
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def build_tokenizer() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|endoftext|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("</think>", special=False)])
    return tokenizer


TOKENIZER = build_tokenizer()
END_OF_TEXT, IM_END, END_THINK = 256, 257, 258


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, VOCABULARY_SIZE, [IM_END, END_OF_TEXT])
    yield compiler
    compiler.close()


def schema(document: object) -> Grammar:
    return Grammar("json_schema", json.dumps(document))


def allowed(matcher: GrammarMatcher) -> set[int]:
    words = np.zeros(VOCABULARY_SIZE // 32, np.int32)
    matcher.fill_mask(words)
    return set(np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def write(compiled: CompiledGrammar, text: str) -> GrammarMatcher:
    """Feed ``text``; every token must be in the mask before it is accepted."""
    matcher = compiled.matcher()
    for token_id in TOKENIZER.encode(text).ids:
        assert token_id in allowed(matcher), f"{TOKENIZER.decode([token_id])!r} in {text!r}"
        assert matcher.accept(token_id)
    return matcher


def refuses(compiled: CompiledGrammar, text: str) -> bool:
    matcher = compiled.matcher()
    for token_id in TOKENIZER.encode(text).ids:
        if token_id not in allowed(matcher):
            return True
        matcher.accept(token_id)
    return IM_END not in allowed(matcher)


def test_a_complete_output_allows_only_the_end_tokens(compiler: GrammarCompiler) -> None:
    """A model that goes on after the closing brace would spoil the JSON."""
    compiled = compiler.compile(schema(SCHEMA))
    matcher = write(compiled, '{"name": "Bo\\n", "age": 31')
    assert not matcher.is_finished
    assert IM_END not in allowed(matcher)
    matcher.accept(TOKENIZER.encode("}").ids[0])
    assert matcher.is_finished
    assert allowed(matcher) == {END_OF_TEXT, IM_END}
    assert matcher.accept(IM_END)
    assert matcher.error is None


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema(SCHEMA), '{"name":"x","age":0}', '{"name":"x"}'),
        (Grammar("json_object", ""), '{"any": [1, {"x": null}]}', "[1]"),
        (Grammar("regex", r"[a-c]{2}\d+"), "ab12", "ad1"),
        (Grammar("choice", json.dumps(["yes", 'a "b"\\\n', "日本"])), 'a "b"\\\n', "no"),
        (Grammar("choice", json.dumps(["yes", 'a "b"\\\n', "日本"])), "日本", "日"),
        (Grammar("lark", 'start: "<" /[0-9]+/ ">"'), "<42>", "<>"),
    ],
)
def test_every_kind_allows_and_refuses(
    compiler: GrammarCompiler, grammar: Grammar, good: str, bad: str
) -> None:
    compiled = compiler.compile(grammar)
    assert IM_END in allowed(write(compiled, good))
    assert refuses(compiled, bad)


def test_white_space_between_json_tokens_is_bounded(compiler: GrammarCompiler) -> None:
    """Would catch a weak model that writes white space until its tokens run out, and pretty printing refused."""
    compiled = compiler.compile(schema({"type": "object", "properties": {"a": {"type": "integer"}}}))
    write(compiled, '{ "a": 1 }')
    write(compiled, "{\n" + 8 * "  " + '"a": 1\r\n\t}')
    for runaway in ("{  ", "{\n\n", "{ \n", "{\n" + 33 * " "):
        assert refuses(compiled, runaway + '"a"')


def test_the_constraint_starts_after_the_marker(compiler: GrammarCompiler) -> None:
    """With thinking on, the schema binds the answer, not the thoughts."""
    matcher = compiler.compile(schema(SCHEMA)).matcher(starts_after=END_THINK)
    for token_id in [*TOKENIZER.encode("hmm").ids, IM_END]:
        assert len(allowed(matcher)) == VOCABULARY_SIZE
        assert matcher.accept(token_id)
        assert not matcher.is_finished
    matcher.accept(END_THINK)
    assert allowed(matcher) == {TOKENIZER.encode("{").ids[0]}


def test_sequences_of_one_grammar_do_not_share_their_position(compiler: GrammarCompiler) -> None:
    """n choices of one request start from one compiled form."""
    compiled = compiler.compile(Grammar("regex", "ab|cd"))
    first, second = compiled.matcher(), compiled.matcher()
    first.accept(TOKENIZER.encode("a").ids[0])
    assert allowed(first) == set(TOKENIZER.encode("b").ids)
    assert allowed(second) == set(TOKENIZER.encode("ac").ids)


def test_a_token_outside_the_grammar_ends_only_that_matcher(compiler: GrammarCompiler) -> None:
    """Nothing is allowed then, so the sampler flags the row, and ``error`` has the reason."""
    compiled = compiler.compile(Grammar("regex", "ab"))
    matcher = compiled.matcher()
    assert not matcher.accept(TOKENIZER.encode("z").ids[0])
    assert allowed(matcher) == set()
    assert matcher.error is not None
    assert not matcher.is_finished
    assert compiled.matcher().error is None


def test_a_grammar_that_grows_too_complex_stops_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance builds its automaton as the output grows, so a costly expression shows itself only at a
    mask. (With 260 tokens the real limit is out of reach; a lower one stands in for it.)"""
    monkeypatch.setattr(grammar_module, "LLParserLimits", partial(LLParserLimits, step_lexer_fuel=20))
    compiler = GrammarCompiler(TOKENIZER, VOCABULARY_SIZE, [IM_END])
    matcher = compiler.compile(Grammar("regex", r"(a|ab|abc|.{3}|[^z]{1,5}){100,200}")).matcher()
    for token_id in TOKENIZER.encode("aa").ids:
        allowed(matcher)
        matcher.accept(token_id)
    assert allowed(matcher) == set()
    assert matcher.error == "lexer error: too many expressions constructed"
    assert not matcher.is_finished
    compiler.close()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (schema({"type": "string", "not": {"const": "x"}}), "unsupported keyword 'not'"),
        (
            schema({"type": "array", "uniqueItems": True, "contains": {}}),
            "'uniqueItems', 'contains'|'contains'",
        ),
        (schema({"type": "objekt"}), "Invalid type: objekt"),
        (schema({"type": "string", "pattern": "(?=a)b"}), r"'\(\?=a\)b' is not supported: look-around"),
        (schema({"type": "string", "format": "fax"}), "Unknown format: fax"),
        (schema({"$ref": "#/$defs/gone"}), "gone"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (schema({"x-guidance": {"lenient": True}, "not": {}}), "'not'"),
        (schema([1]), "must be a JSON object"),
        (Grammar("json_schema", "{"), "is not valid"),
        (Grammar("json_schema", '{"not":' * 5000 + "1" + "}" * 5000), "nested too deeply|recursion"),
        (Grammar("json_schema", "\ud800"), "is not valid"),
        (Grammar("regex", "([a-z"), "unclosed"),
        (Grammar("lark", "start: nothing"), "nothing"),
        (Grammar("choice", "[]"), "list of one or more strings"),
        (Grammar("choice", '["a", 3]'), "list of one or more strings"),
        (Grammar("ebnf", "x"), "'ebnf' is not known"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    compiler: GrammarCompiler, grammar: Grammar, message: str
) -> None:
    """A client must learn which keyword to remove, and on one line."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compiler.compile(grammar, param="response_format")
    assert caught.value.status == 400
    assert caught.value.param == "response_format"
    assert "\n" not in caught.value.message


def test_compilation_is_bounded_in_size_and_time() -> None:
    """An endless compilation must not hold a request; a huge grammar is refused before any work."""
    compiler = GrammarCompiler(
        TOKENIZER, VOCABULARY_SIZE, [IM_END], time_limit_seconds=1e-3, max_bytes=100_000
    )
    wide = {f"k{i}": {"type": "string", "pattern": f"^[a-z]{{{i + 1}}}$"} for i in range(300)}
    with pytest.raises(InvalidRequestError, match=r"longer than 0\.001 seconds") as caught:
        compiler.compile(schema({"type": "object", "properties": wide}))
    assert caught.value.code == "grammar_too_complex"
    with pytest.raises(InvalidRequestError, match="the limit is 100000"):
        compiler.compile(Grammar("regex", "a" * 100_001), param="regex")
    compiler.close()


def test_compiled_grammars_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same schema arrives with every request of an agent."""
    monkeypatch.setattr(grammar_module, "CACHED_GRAMMARS", 3)
    compiler = GrammarCompiler(TOKENIZER, VOCABULARY_SIZE, [IM_END])
    first = compiler.compile(Grammar("regex", "keep"))
    for number in range(5):
        assert compiler.compile(Grammar("regex", "keep")) is first
        compiler.compile(Grammar("regex", f"other{number}"))
    for number in range(3):
        compiler.compile(Grammar("regex", f"more{number}"))
    assert compiler.compile(Grammar("regex", "keep")) is not first
    compiler.close()
