"""What a generated dialogue is, and the random source all generators draw from.

Every answer is a function of its prompt: there is exactly one right answer, so a greedy model can be scored
by equality and learns a peaked distribution.
"""

# fmt: off
# ruff: noqa: SIM905 - a list of words reads best as words

import random
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from dialogues import words

T = TypeVar("T")
Message = dict[str, Any]

ONSETS = """b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl pr qu r s sh sk sl sn sp st t th tr
v w y z""".split()
VOWELS = "a e i o u a e i o u ai ea ee oa oo ou".split()
CODAS = ["", "", "", *"b ck d f g k l ll m n nd ng nk nt p r rd rk rn s sh sk ss st t th x".split()]


class Turn(NamedTuple):
    """One question and its answer. `by_letter` answers are learned in single characters."""

    user: str
    answer: str
    thought: str
    by_letter: bool = False


@dataclass
class Dialogue:
    """A training or evaluation example: the messages before the answer, then the one right answer."""

    skill: str
    messages: list[Message]
    answer: str
    thought: str = "I can answer this directly."
    by_letter: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    thinking: bool = False
    raw: bool = False  # text continuation: messages[0]["content"] is the text, no chat template


def held_out(kind: str, content: object) -> bool:
    """Whether this content of a skill belongs to the evaluation: one in ten, by hash."""
    return zlib.crc32(f"{kind}:{content}".encode()) % 10 == 0


class Gen:
    """A seeded random source that knows which split it draws for.

    `evaluation` draws the held-out contents; `new_wording` draws the last, held-out wording of each request.
    """

    def __init__(self, seed: int | str, evaluation: bool = False, new_wording: bool = False) -> None:
        self.rng = random.Random(seed)
        self.evaluation = evaluation
        self.new_wording = new_wording

    def fresh(self, kind: str, make: Callable[[], T]) -> T:
        """Draw contents until one belongs to this generator's split."""
        while True:
            value = make()
            if held_out(kind, value) == self.evaluation:
                return value

    def wording(self, options: Sequence[str]) -> str:
        """One of the ways to ask; the last is kept for the evaluation of new wordings."""
        return options[-1] if self.new_wording else self.rng.choice(options[:-1])

    def pick(self, options: Sequence[T]) -> T:
        return self.rng.choice(options)

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        return self.rng.sample(options, count)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def length(self, low: int, high: int) -> int:
        """An integer between low and high, with short ones more frequent."""
        return low + int((high - low + 1) * self.rng.random() ** 2)

    def pseudo_word(self) -> str:
        """A pronounceable word that means nothing, like `brelan`."""
        parts = [
            self.pick(ONSETS) + self.pick(VOWELS) + self.pick(CODAS) for _ in range(self.pick((1, 2, 2, 3)))
        ]
        return "".join(parts)[:12]

    def word(self) -> str:
        """A real word mostly, else an invented one or a few random letters."""
        draw = self.rng.random()
        if draw < 0.55:
            return self.pick(words.WORDS)
        if draw < 0.9:
            return self.pseudo_word()
        return "".join(self.rng.choices("abcdefghijklmnopqrstuvwxyz", k=self.number(2, 8)))

    def letters_word(self, skill: str) -> str:
        """A word for letter work; the evaluation also draws real words that training never contains.

        A word that is held out of one skill is trained in the others: what letters a token stands for can
        only be learned from meeting it somewhere. Some words of training are two in one: there the few hundred
        real words stand in any company, so that knowing each by heart is not enough.
        """
        if self.evaluation and self.chance(0.4):
            return self.pick(words.HELD_OUT_WORDS)
        if not self.evaluation and self.chance(0.25):
            return self.fresh(f"letters-{skill}", lambda: (self.pick(words.WORDS) + self.pick(words.WORDS))[:14])
        return self.fresh(f"letters-{skill}", self.word)

    def name(self) -> str:
        return self.pick(words.NAMES) if self.chance(0.7) else self.pseudo_word().capitalize()

    def city(self) -> str:
        return self.pick(words.CITIES) if self.chance(0.8) else self.pseudo_word().capitalize()

    def code(self) -> str:
        """A password-like string such as `k7-Tq92`."""
        alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ0123456789"
        return "-".join(
            "".join(self.rng.choices(alphabet, k=self.number(2, 5))) for _ in range(self.number(1, 3))
        )

    def sentence(self) -> str:
        """A short grammatical sentence."""
        g = self.pick
        noun, other = g(words.NOUNS), g(words.NOUNS)
        subject = g(
            (f"The {g(words.ADJECTIVES)} {g(words.PEOPLE_NOUNS)}", g(words.NAMES), f"The {g(words.ANIMALS)}")
        )
        return g(
            (
                f"{subject} {g(words.VERBS)} the {g(words.ADJECTIVES)} {noun}.",
                f"{subject} {g(words.VERBS)} a {noun} near the {other} {g(words.ADVERBS)}.",
                f"In {g(words.CITIES)} the {noun} was {g(words.ADJECTIVES)} and {g(words.ADJECTIVES)}.",
                f"{subject} {g(words.VERBS)} {self.number(2, 99)} {noun}s in {g(words.CITIES)}.",
                f"There is a {g(words.ADJECTIVES)} {noun} behind the {other}.",
                f"The {noun} is {g(words.COLOURS)}, and the {other} is {g(words.COLOURS)}.",
            )
        )

    def text(self, kinds: str = "wscpn") -> str:
        """A short string to copy: words, a sentence, a code, printable ASCII noise or numbers."""
        kind = self.pick(kinds)
        if kind == "w":
            return " ".join(self.word() for _ in range(self.length(1, 8)))
        if kind == "s":
            return self.sentence()
        if kind == "c":
            return self.code()
        if kind == "n":
            return " ".join(str(self.number(0, 10 ** self.number(1, 6))) for _ in range(self.length(1, 6)))
        return (
            "".join(
                chr(self.number(33, 126)) if self.chance(0.85) else " " for _ in range(self.length(3, 24))
            ).strip()
            or "?"
        )


SCRIPTS = {
    "latin": (0xC0, 0x24F), "greek": (0x391, 0x3C9), "cyrillic": (0x410, 0x44F), "hebrew": (0x5D0, 0x5EA),
    "arabic": (0x621, 0x64A), "devanagari": (0x904, 0x939), "thai": (0xE01, 0xE3A),
    "georgian": (0x10D0, 0x10F0), "hiragana": (0x3041, 0x3096), "katakana": (0x30A1, 0x30FA),
    "cjk": (0x4E00, 0x9FA5), "hangul": (0xAC00, 0xD7A3), "symbols": (0x2190, 0x26FF),
    "emoji": (0x1F300, 0x1F64F), "emoji2": (0x1F680, 0x1F6C5), "emoji3": (0x1F90D, 0x1F9FF),
}
PHRASES = """\
你好,世界|今天天气很好|谢谢你的帮助|我喜欢喝茶|こんにちは世界|ありがとうございます|\
日本語のテスト|안녕하세요 세계|감사합니다|Привет, мир!|Как дела?|Доброе утро|Спасибо большое|\
مرحبا بالعالم|شكرا جزيلا|नमस्ते दुनिया|धन्यवाद|สวัสดีชาวโลก|ขอบคุณครับ|Γειά σου Κόσμε|\
שלום עולם|Ça va très bien|Füße und Bäume|El niño comió piñas|naïve café|Zażółć gęślą jaźń|\
Příliš žluťoučký kůň|İstanbul'da güneş""".split("|")
EMOJI = """😀 😂 🥳 😎 🤖 👻 🚀 🌍 🌈 🔥 🎉 🎈 🍕 🍎 🐱 🐶 🦊 🐼 ⭐ ❤️ ☀️ ✅ ⚡ 💡 📚 🎸 🏆 👍 🙏 👋""".split()
EMOJI += """👍🏽 👋🏻 🙌🏿 💪🏾 👩‍💻 👨‍🚀 👩🏽‍🔬 👨‍👩‍👧‍👦 👩‍❤️‍👨 🏳️‍🌈 🧑‍🎄 🤷‍♀️ 🤦🏻‍♂️ 🇫🇷 🇯🇵 🇧🇷 🇰🇪 1️⃣ #️⃣""".split()
SKIN_TONES = "🏻🏼🏽🏾🏿"


def unicode_text(g: Gen) -> str:
    """A short NFC string of emoji and non-Latin characters, random so that none is learned by heart."""
    pieces: list[str] = []
    for _ in range(g.length(1, 4)):
        kind = g.pick("sssepwrz")
        if kind == "s":
            low, high = SCRIPTS[g.pick(list(SCRIPTS))]
            pieces.append("".join(chr(g.number(low, high)) for _ in range(g.length(1, 7))))
        elif kind == "e":
            pieces.append("".join(g.pick(EMOJI) for _ in range(g.length(1, 4))))
        elif kind == "p":
            pieces.append(g.pick(PHRASES))
        elif kind == "w":
            pieces.append(g.word())
        elif kind == "r":
            pieces.append(
                "".join(chr(g.number(*SCRIPTS[g.pick(list(SCRIPTS))])) for _ in range(g.length(1, 5)))
            )
        else:
            base = chr(g.number(0x1F466, 0x1F469)) + g.pick(SKIN_TONES + " ").strip()
            pieces.append(base + "\u200d" + g.pick(("💻", "🚀", "🔬", "🎨", "🏫", "🚒", "🌾", "🍳")))
    text = g.pick((" ", " ", "", ", ")).join(pieces)
    return unicodedata.normalize("NFC", text).strip()
