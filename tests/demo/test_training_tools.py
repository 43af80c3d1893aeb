"""The demo model's training tools: tokenizer, generators, rendering, training model, resume."""

import argparse
import json
import sys
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

TOOLS = Path(__file__).parents[2] / "tools" / "train_demo_model"
sys.path.insert(0, str(TOOLS))

import train  # noqa: E402
from data import DEMO_MODEL, TRAINED, Encoder, make_batch, render  # noqa: E402
from dialogues import SKILLS, Dialogue, Gen, base, draw, text_skills, words  # noqa: E402
from dialogues.qa import ENTRIES, REWORDINGS, ask, plain, qa, unknown  # noqa: E402
from dialogues.recall import recall  # noqa: E402
from evaluate import held_out_set  # noqa: E402
from export import write_folder  # noqa: E402
from modeling import Compute, ModelConfig, Packing, Qwen3  # noqa: E402

torch.set_num_threads(1)
TINY = ModelConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def _dialogues(count: int, evaluation: bool = False) -> list[Dialogue]:
    return [
        draw(Gen(f"test-{i}", evaluation), SKILLS[i % len(SKILLS)], max_characters=1500) for i in range(count)
    ]


def test_every_byte_is_a_token(tokenizer: Tokenizer) -> None:
    """A byte outside the vocabulary would lose parts of emoji in echoed text."""
    from tokenizers.pre_tokenizers import ByteLevel

    assert all(tokenizer.token_to_id(character) is not None for character in ByteLevel.alphabet())
    assert len(ByteLevel.alphabet()) == 256


def test_unicode_text_round_trips_over_several_tokens(tokenizer: Tokenizer) -> None:
    """A merge or normalizer that is not Qwen's would change text on its way through the tokenizer."""
    for text in (*base.EMOJI, *base.PHRASES, *(base.unicode_text(Gen(i)) for i in range(200))):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        if not text.isascii():
            assert len(ids) > 1


def test_special_tokens_keep_qwens_roles(tokenizer: Tokenizer) -> None:
    """Decoding with skip_special_tokens must hide <|im_end|> and keep <think>, as with Qwen3."""
    hidden = "".join(f"<|{name}|>" for name in ("endoftext", "im_start", "im_end"))
    shown = "<think></think><tool_call></tool_call><tool_response></tool_response>"
    ids = tokenizer.encode(hidden + shown, add_special_tokens=False).ids
    assert len(ids) == 9
    assert tokenizer.decode(ids, skip_special_tokens=True) == shown
    assert tokenizer.get_vocab_size() == ModelConfig().vocab_size


def test_rendering_equals_the_chat_template() -> None:
    """Training on text that the server's template does not produce would teach the wrong format."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(
        json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())["chat_template"]
    )
    for dialogue in _dialogues(400):
        if dialogue.raw:
            continue
        wanted = template.render(
            messages=dialogue.messages,
            tools=dialogue.tools or None,
            add_generation_prompt=True,
            enable_thinking=dialogue.thinking,
        )
        pieces = render(dialogue)
        assert "".join(piece.text for piece in pieces if piece.kind != "answer") == wanted
        assert "".join(piece.text for piece in pieces).endswith("<|im_end|>")


def test_encoding_by_pieces_equals_encoding_the_prompt() -> None:
    """The server encodes the whole prompt at once; other ids in training would be another prompt."""
    encoder = Encoder()
    for dialogue in _dialogues(200):
        prompt = "".join(piece.text for piece in render(dialogue) if piece.kind != "answer")
        (ids,) = encoder.encode([dialogue], train_earlier=False)
        given = ids[: np.flatnonzero(ids & TRAINED)[0]]
        assert given.tolist() == encoder.tokenizer.encode(prompt, add_special_tokens=False).ids
        assert encoder.tokenizer.decode(
            (ids & ~np.uint16(TRAINED)).tolist(), skip_special_tokens=False
        ).startswith(prompt)


def test_evaluation_contents_are_disjoint_from_training() -> None:
    """An instance in both splits would measure memory where skill is claimed."""
    makers = (text_skills.spell, text_skills.reverse, text_skills.unicode_echo, text_skills.sort, qa, unknown)
    for make in makers:
        trained = {make(Gen(f"a{i}")).user.lower() for i in range(1500)}
        held_out = {make(Gen(f"b{i}", evaluation=True)).user.lower() for i in range(300)}
        assert not trained & held_out
    corpus_words = {*words.WORDS, *(name.lower() for name in words.NAMES + words.CITIES)}
    assert not corpus_words & set(words.HELD_OUT_WORDS)


def test_questions_are_unambiguous() -> None:
    """One wording with two answers cannot be learned, and a held-out wording must not be a trained one."""
    owner: dict[str, int] = {}
    for i, entry in enumerate(ENTRIES):
        for text in entry.subjects + entry.questions + entry.held_out:
            assert owner.setdefault(plain(text), i) == i, text
        assert not {plain(text) for text in entry.questions} & {plain(text) for text in entry.held_out}
    assert "Why does a KV cache speed up decoding?" in {q for entry in ENTRIES for q in entry.questions}


def test_held_out_questions_stay_held_out_when_questions_are_reworded() -> None:
    """A trained question in another form may be the very wording that the evaluation asks."""
    held_out = {plain(text) for entry in ENTRIES for text in entry.held_out}
    trained = {plain(ask(Gen(f"{i}-{k}"), entry)) for i, entry in enumerate(ENTRIES) for k in range(60)}
    assert not trained & held_out
    for form, others in REWORDINGS:
        assert any(form.fullmatch(question) for entry in ENTRIES for question in entry.questions), form
        assert all(other.count("{}") == form.groups for other in others)


def test_control_tokens_are_refused_in_texts(tokenizer: Tokenizer) -> None:
    """An answer that spells <|im_end|> ends there when it is served, and its rest is never said."""
    for token in tokenizer.get_added_tokens_decoder().values():
        for dialogue in (
            Dialogue("qa", [{"role": "user", "content": "Stop?"}], f"With {token.content}."),
            Dialogue("qa", [{"role": "user", "content": f"What is {token.content}?"}], "A token."),
        ):
            with pytest.raises(ValueError, match="in the text of a qa dialogue"):
                render(dialogue)
    for entry in ENTRIES:
        render(Dialogue("qa", [{"role": "user", "content": "?"}], entry.answer))


def test_answers_are_right() -> None:
    """A generator with a wrong answer teaches a wrong answer."""
    for i in range(300):
        g = Gen(i)
        turn = text_skills.arithmetic(g)
        left, _, right = turn.answer.partition(" = ")
        assert eval(left) == int(right)
        turn = text_skills.spell(g)
        assert turn.answer.replace("-", "") in turn.user
        turn = text_skills.echo(g)
        assert turn.answer.split(" ")[0] in turn.user
        dialogue = recall(Gen(i, evaluation=True))
        value = dialogue.answer.removesuffix(".").partition(" is ")[2]
        assert any(f"{value}." in message["content"] for message in dialogue.messages)


def test_evaluation_set_is_the_same_each_time() -> None:
    """Scores of two models can be compared only on the same questions."""
    assert held_out_set(2) == held_out_set(2)


def test_training_model_equals_transformers(tmp_path: Path) -> None:
    """A training model that is not quite Qwen3 would export weights that the server runs wrongly."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = Qwen3(TINY)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    write_folder(model.state_dict(), TINY, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"
    model.load_state_dict({name: p.bfloat16().float() for name, p in model.state_dict().items()})
    documents = [torch.randint(0, 4000, (n,)) for n in (5, 70, 130)]
    starts = np.cumsum([0, *map(len, documents)]).astype(np.int32)
    with torch.no_grad():
        ours = model.logits(model(torch.cat(documents), Packing(starts, Compute(torch.device("cpu")))))
        wanted = torch.cat([theirs(document[None]).logits[0] for document in documents])
    assert torch.allclose(ours, wanted, atol=1e-4, rtol=1e-4)


def test_batches_are_the_same_for_the_same_index() -> None:
    """A resumed run must go on with the batches that an unbroken one would have had."""
    first, again, other = make_batch(3, 7, 4096), make_batch(3, 7, 4096), make_batch(3, 8, 4096)
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)
    assert first.starts[-1] == 4096


def _leg(out: Path, steps: int) -> argparse.Namespace:
    arguments = [
        "--out",
        str(out),
        "--smoke",
        "--device",
        "cpu",
        "--resume",
        "--max-steps",
        str(steps),
        "--total-minutes",
        "60",
    ]
    return train.parse_args(arguments)


def test_resume_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leg that forgot the optimizer, the step or the data position would start over."""

    class InProcess:
        def __init__(self, seed: int, start: int, size: int, workers: int) -> None:
            self.seed, self.index, self.size, self.replayed = seed, start, size, 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            while True:
                self.index += 1
                yield make_batch(self.seed, self.index - 1, self.size)

        def close(self) -> None:
            pass

    monkeypatch.setattr(train, "BatchStream", InProcess)
    monkeypatch.setattr(
        train, "learning_rate", lambda progress, step: 1.0
    )  # the real one depends on the clock
    whole = train.train(_leg(tmp_path / "whole", 4))
    train.train(_leg(tmp_path / "legs", 2))
    resumed = train.train(_leg(tmp_path / "legs", 2))
    assert (resumed.step, resumed.batch_index, resumed.tokens) == (4, 4, 4 * 4096)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
