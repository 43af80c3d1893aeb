"""Dialogues to tokens: render them in Qwen's chat format, tokenize, pack, stream from workers."""

import itertools
import json
import os
import random
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from dialogues import MIX, SKILLS, Dialogue, Gen, draw
from tokenizers import Tokenizer

DEMO_MODEL = Path(__file__).resolve().parents[2] / "src" / "helios" / "demo_model"
MAX_LENGTH = 2304  # tokens of one dialogue
TRAINED = 0x8000  # the bit of a stored token that says: this token is a target
SHORT_BATCHES = 600  # the first batches hold short recall texts only

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
    '"arguments": <args-json-object>}\n</tool_call>'
)
# The tokenizer's added tokens, spelled out: in a dialogue's own text they would become control tokens.
_CONTROL = re.compile(r"<\|[a-z_]+\|>|</?(?:think|tool_call|tool_response)>")
_EMPTY_THINK = "<think>\n\n</think>\n\n"


class Piece(NamedTuple):
    """A run of text: given, an earlier answer (trained but for its first token), or the answer itself."""

    text: str
    kind: str = "given"
    by_letter: bool = False


def _calls(tool_calls: list[dict[str, Any]]) -> str:
    lines = []
    for call in tool_calls:
        function = call.get("function", call)
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        lines.append(f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(lines)


def render(dialogue: Dialogue) -> list[Piece]:
    """What Qwen3's chat template makes of the dialogue (chat_template.jinja; a test compares the two).

    ValueError where a text spells a control token: the model would learn to end its answer there.
    """
    for text in (dialogue.answer, dialogue.thought, *(m["content"] for m in dialogue.messages)):
        if "<" in text and (found := _CONTROL.search(text)):
            raise ValueError(f"{found.group()} in the text of a {dialogue.skill} dialogue: {text}")
    if dialogue.raw:
        return [
            Piece(dialogue.messages[0]["content"]),
            Piece(dialogue.answer, "answer"),
            Piece("<|endoftext|>", "answer"),
        ]
    messages = dialogue.messages
    pieces: list[Piece] = []
    if dialogue.tools:
        system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
        schemas = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in dialogue.tools)
        pieces.append(Piece(f"<|im_start|>system\n{system}{_TOOLS_HEAD}{schemas}{_TOOLS_TAIL}<|im_end|>\n"))
    elif messages[0]["role"] == "system":
        pieces.append(Piece(f"<|im_start|>system\n{messages[0]['content']}<|im_end|>\n"))
    for message in messages[messages[0]["role"] == "system" :]:
        if message["role"] == "user":
            pieces.append(Piece(f"<|im_start|>user\n{message['content']}<|im_end|>\n"))
        elif message["role"] == "tool":
            pieces.append(
                Piece(
                    f"<|im_start|>user\n<tool_response>\n{message['content']}\n</tool_response><|im_end|>\n"
                )
            )
        else:
            # Merged tokens are no target where the answer is to be given by letters.
            answer = message["content"] + _calls(message.get("tool_calls", []))
            pieces += [
                Piece("<|im_start|>assistant\n"),
                Piece(answer, "given" if message.get("by_letter") else "earlier"),
                Piece("<|im_end|>", "earlier"),
                Piece("\n"),
            ]
    pieces.append(Piece("<|im_start|>assistant\n" + _EMPTY_THINK * (not dialogue.thinking)))
    if dialogue.thinking:
        pieces.append(Piece(f"<think>\n{dialogue.thought}\n</think>\n\n", "answer"))
    answer = dialogue.answer + _calls(dialogue.tool_calls)
    return [*pieces, Piece(answer, "answer", dialogue.by_letter), Piece("<|im_end|>", "answer")]


class Encoder:
    """Tokenizes rendered dialogues."""

    def __init__(self, folder: Path = DEMO_MODEL) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._letters: dict[str, list[int]] = {}

    def _by_letter(self, text: str) -> list[int]:
        ids: list[int] = []
        for character in text:
            if character not in self._letters:
                self._letters[character] = self.tokenizer.encode(character, add_special_tokens=False).ids
            ids += self._letters[character]
        return ids

    def encode(self, dialogues: list[Dialogue], train_earlier: bool = True) -> list[np.ndarray]:
        """One uint16 array per dialogue; targets carry the TRAINED bit."""
        rendered = [render(dialogue) for dialogue in dialogues]
        flat = [piece.text for pieces in rendered for piece in pieces]
        encoded = iter(self.tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        arrays = []
        for pieces in rendered:
            ids: list[int] = []
            for piece in pieces:
                own = next(encoded).ids
                if piece.by_letter:
                    own = self._by_letter(piece.text)
                if piece.kind == "answer":
                    own = [token | TRAINED for token in own]
                elif piece.kind == "earlier" and train_earlier:
                    # Whether a think block opens an answer is for the last answer alone to teach.
                    skip = 0 if piece.text == "<|im_end|>" else 1
                    own = own[:skip] + [token | TRAINED for token in own[skip:]]
                ids += own
            arrays.append(np.array(ids, dtype=np.uint16))
        return arrays


@dataclass
class Batch:
    """Dialogues packed back to back into one flat array of tokens, and where each starts."""

    tokens: np.ndarray  # [tokens] uint16, with TRAINED bits
    starts: np.ndarray  # [dialogues + 1] int32


def pack(arrays: list[np.ndarray], size: int, pad: int) -> Batch:
    """Concatenate the arrays and pad to `size` with one dialogue without targets."""
    lengths = [len(array) for array in arrays]
    padding = size - sum(lengths)
    while padding > 0:
        lengths.append(min(padding, MAX_LENGTH))
        padding -= lengths[-1]
    tokens = np.full(size, pad, dtype=np.uint16)
    tokens[: sum(map(len, arrays))] = np.concatenate(arrays)
    return Batch(tokens, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


_encoder: Encoder | None = None


def make_batch(seed: int, index: int, size: int) -> Batch:
    """The training batch of this index: the same for the same seed, whoever makes it."""
    global _encoder
    _encoder = _encoder or Encoder()
    g = Gen(f"train-{seed}-{index}")
    max_characters = 900 if index < SHORT_BATCHES else 6500
    arrays: list[np.ndarray] = []
    room = size
    while room > 100:
        skills = g.rng.choices(SKILLS, weights=list(MIX.values()), k=max(1, min(64, room // 160)))
        for array in _encoder.encode([draw(g, skill, max_characters) for skill in skills]):
            if len(array) <= min(room, MAX_LENGTH):
                arrays.append(array)
                room -= len(array)
    return pack(arrays, size, pad=_encoder.tokenizer.token_to_id("<|endoftext|>"))


def _quiet_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


class BatchStream:
    """Batches in order of their index from worker processes; replays old ones rather than wait."""

    def __init__(self, seed: int, start: int, size: int, workers: int, keep: int = 6000) -> None:
        self.index = start
        self.replayed = 0
        self._seed, self._size = seed, size
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_quiet_worker)
        self._upcoming = itertools.count(start)
        self._pending: deque[Future[Batch]] = deque()
        self._past: deque[Batch] = deque(maxlen=keep)
        for _ in range(4 * workers):
            self._submit()

    def _submit(self) -> None:
        self._pending.append(self._pool.submit(make_batch, self._seed, next(self._upcoming), self._size))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if not self._pending[0].done() and len(self._past) >= 100:
                self.replayed += 1
                yield random.choice(self._past)
                continue
            batch = self._pending.popleft().result()
            self._submit()
            self._past.append(batch)
            self.index += 1
            yield batch

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
