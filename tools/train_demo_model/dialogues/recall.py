"""Recall: facts hidden in a long text, asked for afterwards."""

# fmt: off

from dialogues import words
from dialogues.base import Dialogue, Gen, Message, unicode_text
from dialogues.qa import ENTRIES, qa

WORD_FACTS = (
    "code word", "password", "secret word", "magic word", "safe word", "pass phrase", "keyword",
    "hidden word", "project name",
)
NUMBER_FACTS = (
    "secret number", "magic number", "room number", "launch code", "PIN", "order number", "lucky number",
    "serial number", "key number",
)
CITY_FACTS = ("meeting city", "secret city", "home city", "city of the meeting", "destination")
NAME_FACTS = (
    "name of the pilot", "name of the dog", "name of the winner", "name of the agent", "name of the ship",
    "captain's name",
)
COLOUR_FACTS = (
    "colour of the door", "secret colour", "favourite colour", "colour of the key", "colour of the car",
)


def _value(g: Gen, attribute: str) -> str:
    if attribute in NUMBER_FACTS:
        return str(g.number(0, 10 ** g.number(2, 6)))
    if attribute in CITY_FACTS:
        return g.city()
    if attribute in NAME_FACTS:
        return g.name()
    if attribute in COLOUR_FACTS:
        return g.pick(words.COLOURS)
    draw = g.rng.random()
    if draw < 0.55:
        return g.word()
    if draw < 0.7:
        return f"{g.pick(words.ADJECTIVES)} {g.pick(words.NOUNS)}"
    if draw < 0.8:
        return g.word().upper()
    return g.code()


def fact(g: Gen) -> tuple[str, str]:
    """An attribute and its value, like ("code word", "brelan")."""
    attribute = g.pick(g.pick((WORD_FACTS, WORD_FACTS, NUMBER_FACTS, CITY_FACTS, NAME_FACTS, COLOUR_FACTS)))
    attribute = "code word" if g.chance(0.2) else attribute
    if g.chance(0.1):
        attribute = f"{g.pick(('magic number', 'code', 'key'))} of {g.pick(words.CITIES)}"
    return g.fresh("recall", lambda: (attribute, _value(g, attribute)))


def filler(g: Gen, size: int) -> list[str]:
    """Paragraph pieces of about `size` characters together, of one or two kinds."""
    kinds = g.sample(FILLERS, g.pick((1, 1, 2)))
    pieces: list[str] = []
    total = 0
    while total < size:
        piece = g.pick(kinds)(g, size - total)
        pieces.extend(piece)
        total += sum(map(_cost, piece))
    return pieces


def _cost(text: str) -> int:
    """Characters of plain English that take as many tokens: digits and non-ASCII bytes take one each."""
    return len(text) + 1 + 3 * (len(text.encode()) - len(text)) + 2 * sum(map(str.isdigit, text))


def _sentences(g: Gen, size: int) -> list[str]:
    return [g.sentence() for _ in range(max(1, min(size, 500) // 45))]


def _repeated(g: Gen, size: int) -> list[str]:
    classic = [
        "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.",
        "There and back again.",
    ]
    unit = g.pick((classic, classic[:1], [g.sentence()], [g.sentence(), g.sentence()], [g.word()]))
    return (unit * (size // sum(map(_cost, unit)) + 1))[: g.number(5, 200)]


def _numbers(g: Gen, size: int) -> list[str]:
    if g.chance(0.3):
        start = g.number(0, 500)
        return [f"Line {start + i}: {g.sentence()}" for i in range(max(1, min(size, 600) // 60))]
    return [
        ", ".join(str(g.number(0, 999)) for _ in range(g.number(3, 12))) + "."
        for _ in range(max(1, min(size, 300) // 30))
    ]


def _facts_text(g: Gen, size: int) -> list[str]:
    return [g.pick(ENTRIES).answer for _ in range(max(1, min(size, 500) // 150))]


def _words(g: Gen, size: int) -> list[str]:
    return [
        " ".join(g.word() for _ in range(g.number(4, 14))) + "." for _ in range(max(1, min(size, 400) // 60))
    ]


def _log_lines(g: Gen, size: int) -> list[str]:
    return [
        f"[{g.number(10, 23)}:{g.number(10, 59)}] {g.pick(words.NAMES)}: {g.pick((g.sentence, g.code))()}"
        for _ in range(max(1, min(size, 400) // 60))
    ]


def _emoji(g: Gen, size: int) -> list[str]:
    return [unicode_text(g) for _ in range(max(1, min(size, 60) // 20))]


FILLERS = (_sentences, _sentences, _repeated, _repeated, _numbers, _facts_text, _words, _log_lines, _emoji)


def state(g: Gen, attribute: str, value: str) -> str:
    """A sentence that tells the fact."""
    return g.wording(
        (
            f"The {attribute} is {value}.", f"The {attribute} is {value}.", f"The {attribute} is: {value}.",
            f"Remember: the {attribute} is {value}.", f"Remember that the {attribute} is {value}.",
            f"Note that the {attribute} is {value}.", f"By the way, the {attribute} is {value}.",
            f"Important: the {attribute} is {value}.", f"Do not forget: the {attribute} is {value}.",
            f"{attribute}: {value}.", f"One thing to remember: the {attribute} is {value}.",
            f"Please remember this: The {attribute} is {value}.",
        )
    )


def inquire(g: Gen, attribute: str) -> str:
    """A question for the fact."""
    return g.wording(
        (
            f"What is the {attribute}?", f"What is the {attribute}?", f"What was the {attribute}?",
            f"Tell me the {attribute}.", f"what is the {attribute}",
            f"What is the {attribute} mentioned above?", f"What's the {attribute}?",
            f"Question: What is the {attribute}?", f"Do you remember the {attribute}?",
            f"Can you tell me the {attribute}?", f"Repeat the {attribute}.",
            f"Now tell me: what is the {attribute}?", f"Please give me the {attribute}.",
        )
    )


def recall(g: Gen, max_characters: int = 6500) -> Dialogue:
    """One to four facts in filler text; one is asked for last, others perhaps before it."""
    size = g.number(0, 400) if g.chance(0.3) else g.number(100, max_characters)
    facts = dict(fact(g) for _ in range(g.pick((1, 1, 2, 2, 3, 4))))
    pieces = filler(g, size) if size > 30 else []
    for attribute, value in facts.items():
        pieces.insert(g.number(0, len(pieces)), state(g, attribute, value))
    text = g.pick((" ", " ", "\n", "\n\n")).join(pieces)
    asked = list(facts)
    g.rng.shuffle(asked)
    turns = [
        (inquire(g, attribute), f"The {attribute} is {facts[attribute]}.")
        for attribute in asked[: g.pick((1, 1, 2, 3))]
    ]
    if g.chance(0.06) and not g.evaluation:
        turn = qa(g)
        turns.append((turn.user, turn.answer))
    messages: list[Message] = []
    place = g.pick(("system", "user", "user", "first turn"))
    if place == "system":
        messages.append({"role": "system", "content": text})
    elif place == "user":
        turns[0] = (f"{text}{g.pick((' ', chr(10), chr(10) * 2))}{turns[0][0]}", turns[0][1])
    else:
        lead = g.pick(("", "Read this text:\n", "Here is a text. ", "Remember this. "))
        messages += [{"role": "user", "content": lead + text}, {"role": "assistant", "content": "OK."}]
    for user, answer in turns:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return Dialogue("recall", messages[:-1], turns[-1][1], "The text above says it.")
