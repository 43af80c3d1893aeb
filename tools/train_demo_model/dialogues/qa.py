"""Questions about inference engineering with answers (qa.txt), capitals, and a polite refusal."""

# fmt: off

import re
from dataclasses import dataclass, field
from pathlib import Path

from dialogues import words
from dialogues.base import Gen, Turn

FALLBACK = (
    "I am a tiny demo model and only know inference engineering and a few small text skills, "
    "so I cannot answer that. For a real answer serve a real model: uv run helios --model Qwen/Qwen3-4B"
)
DEFINITION_WORDINGS = (
    "What is {}?", "What is {}?", "What is {}?", "What are {}?", "What's {}?", "Explain {}.",
    "Explain {} to me.", "Can you explain {}?", "Could you explain {}?", "Please explain {}.",
    "Explain {} in simple words.", "Define {}.", "Tell me about {}.", "Tell me what {} is.",
    "What does {} mean?", "{}?", "What do you know about {}?", "Describe {}.", "I want to understand {}.",
    "Give me a short explanation of {}.", "What exactly is {}?", "In one sentence, what is {}?",
    "How would you explain {}?", "Do you know what {} is?", "Explain briefly: {}",
    "What does the term {} mean?", "Please tell me what {} is.", "Say something about {}.",
    "What is {} in inference?", "What is {} in LLM serving?", "I have heard of {}. What is it?",
    "Teach me about {}.", "Help me understand {}.", "What do you mean by {}?", "What does {} refer to?",
    "Give me the definition of {}.", "Describe {} to me.", "Please explain {} to me.", "Tell me more about {}.",
    "Can you say what {} is?", "Could you describe {}?", "I would like to know what {} is.",
    "What is your explanation of {}?",
)
NEW_DEFINITION_WORDINGS = (
    "Could you tell me what {} is?", "Please describe {}.", "What would you say {} is?",
    "Can you tell me about {}?", "So what is {}?", "Explain to me what {} is.",
)
PREFIXES = (
    "Hi! ", "Hello, ", "Please tell me: ", "Quick question: ", "A question: ", "Hey, ", "Question: ",
    "Now tell me: ", "OK. ",
)
# Trained questions of the form on the left are also asked in the forms on the right, so that a wording that
# is new to one answer is not new to the model.
REWORDINGS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(form), others)
    for form, others in (
        (
            r"How (?:do|can) I (.*)\?",
            (
                "How can I {}?", "How would I {}?", "How does one {}?", "Tell me how to {}.", "How could I {}?",
                "What do I have to do to {}?", "I want to {}. How?", "How do I {}?",
            ),
        ),
        (
            r"What does (.*) do\?",
            (
                "What is the job of {}?", "What is the task of {}?", "What is {} there for?",
                "What role does {} have?", "What is the purpose of {}?", "What is {} for?", "What is {} used for?",
            ),
        ),
        (
            r"What does (.*) (?:mean|stand for|measure)\?",
            ("What is meant by {}?", "What is {} short for?", "What do people mean by {}?", "Meaning of {}?"),
        ),
        (
            r"What happens (?:during|in) (.*)\?",
            ("What is done in {}?", "What goes on in {}?", "What takes place in {}?", "What is done during {}?"),
        ),
        (
            r"How does (.*) work\?",
            ("How does {} function?", "Explain how {} works.", "In what way does {} work?", "Tell me how {} works."),
        ),
        (
            r"What is the difference between (.*) and (.*)\?",
            (
                "How do {} and {} differ?", "What distinguishes {} from {}?", "How does {} differ from {}?",
                "Compare {} with {}.", "{} or {}: what is the difference?",
            ),
        ),
        (
            r"Which (.*) does (.*) (\w+)\?",
            ("What {} does {} {}?", "Tell me which {} {} can {}."),
        ),
    )
)
SUFFIXES = (
    " Thanks!", " Keep it short.", " Answer briefly.", " Please answer in one or two sentences.",
    " Be brief.", " Please.",
)


@dataclass
class Entry:
    """One answer and the ways to ask for it."""

    answer: str
    subjects: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)


def load_entries() -> list[Entry]:
    """Parse qa.txt, then add the capitals."""
    entries: list[Entry] = []
    for line in (Path(__file__).parent / "qa.txt").read_text(encoding="utf-8").splitlines():
        kind, _, text = line.partition(": ")
        if kind == "A":
            entries.append(Entry(text))
        elif kind in ("D", "Q", "H"):
            target = {"D": entries[-1].subjects, "Q": entries[-1].questions, "H": entries[-1].held_out}[kind]
            target.extend(text.split("|"))
    for country, capital in words.CAPITALS.items():
        questions = [
            f"What is the capital of {country}?", f"Name the capital of {country}.", f"capital of {country}",
        ]
        questions += [f"Which city is the capital of {country}?", f"What's the capital of {country}?"]
        new = [f"Tell me the capital of {country}."]
        entries.append(Entry(f"The capital of {country} is {capital.removesuffix('.')}.", [], questions, new))
    return entries


ENTRIES = load_entries()


def plain(text: str) -> str:
    """A question without case and final mark: what makes two wordings the same."""
    return text.lower().rstrip("?.!")


_HELD_OUT = frozenset(plain(text) for entry in ENTRIES for text in entry.held_out)
# Every wording that an entry has already.
_TAKEN = frozenset(plain(text) for entry in ENTRIES for text in entry.subjects + entry.questions + entry.held_out)


def reword(g: Gen, text: str) -> str:
    """The question in another form of the same meaning, unless some entry has that wording already."""
    for form, others in REWORDINGS:
        if match := form.fullmatch(text):
            other = g.pick(others).format(*match.groups())
            return text if plain(other) in _TAKEN else other[0].upper() + other[1:]
    return text


def typo(g: Gen, text: str) -> str:
    """Swap, drop or double one letter of a longer word."""
    parts = text.split(" ")
    long = [i for i, part in enumerate(parts) if len(part) > 4]
    if not long:
        return text
    i = g.pick(long)
    word, at = parts[i], g.number(1, len(parts[i]) - 3)
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    parts[i] = g.pick((swapped, word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:]))
    return " ".join(parts)


def roughen(g: Gen, text: str) -> str:
    """Vary case, punctuation and politeness the way people type."""
    if g.chance(0.45):
        return text
    if g.chance(0.3):
        text = typo(g, text)
    if g.chance(0.3):
        text = text.lower()
    if g.chance(0.3):
        text = text.rstrip("?.!")
    elif g.chance(0.2):
        text = text.rstrip("?.!") + g.pick(("??", "!", ".", " ?", "?"))
    if g.chance(0.3):
        lead = g.pick(PREFIXES)
        text = lead + (
            text[0].lower() + text[1:] if text[:2] not in ("I ", "KV", "TT") and g.chance(0.5) else text
        )
    if g.chance(0.25):
        text += g.pick(SUFFIXES) if text[-1] in "?.!" else "?" + g.pick(SUFFIXES)
    return text.upper() if g.chance(0.02) else text


def ask(g: Gen, entry: Entry) -> str:
    """A wording of the entry's question; the evaluation uses only held-out ones."""
    if g.evaluation:
        if entry.held_out and (not entry.subjects or g.chance(0.5)):
            return g.pick(entry.held_out)
        return _fill(g, NEW_DEFINITION_WORDINGS, entry)
    while True:
        if entry.subjects and (not entry.questions or g.chance(0.6)):
            text = roughen(g, _fill(g, DEFINITION_WORDINGS, entry))
        else:
            question = g.pick(entry.questions)
            text = roughen(g, reword(g, question) if g.chance(0.4) else question)
        if plain(text) not in _HELD_OUT:
            return text


def _fill(g: Gen, wordings: tuple[str, ...], entry: Entry) -> str:
    text = g.pick(wordings).format(g.pick(entry.subjects))
    return text[0].upper() + text[1:]


def qa(g: Gen) -> Turn:
    """A question that the model knows."""
    entry = g.pick(ENTRIES[: -len(words.CAPITALS)]) if g.chance(0.9) else g.pick(ENTRIES)
    return Turn(ask(g, entry), entry.answer, "This is a question that I know the answer to.")


UNKNOWN_WORDINGS = (
    "What is a {noun}?", "Tell me about {city}.", "Who invented the {noun}?", "How do I repair a {noun}?",
    "Write a poem about a {noun}.", "Write a story about a {adjective} {animal}.",
    "How tall is the {noun} in {city}?", "What is the weather in {city}?", "Who is {name} {last}?",
    "When was {name} {last} born?", "How do I cook {food}?", "Give me a recipe with {food} and {food2}.",
    "What is the price of a {noun}?", "Why is the {noun} {colour}?", "Translate {noun} into German.",
    "How do you say {noun} in French?", "Write a letter to {name}.", "Plan a trip to {city}.",
    "What is the best restaurant in {city}?", "How many people live in {city}?",
    "Who won the match in {year}?", "What happened in {year}?", "Which {animal} is the fastest?",
    "Can {animal}s swim?", "What do {animal}s eat?", "How long does a {animal} live?", "Is {food} healthy?",
    "How far is it from {city} to {city2}?", "Who is the president of {country}?",
    "What is the population of {country}?", "Which language do they speak in {country}?",
    "Write a song about {nature}.", "Why does it {nature}?", "What should I wear today?",
    "What is the meaning of life?", "Who wrote the book about the {noun}?", "Explain {science}.",
    "What is {science}?", "Tell me something about {science}.", "How do I learn {science}?",
    "Write a Python program that draws a {noun}.", "What is the square root of {year}?",
    "Solve x + {year} = 9000.", "Do you like {food}?", "Are you a {animal}?",
    "What is your favourite {noun}?", "Recommend a film about {animal}s.", "How do I become a {job}?",
    "What does a {job} do?", "How much does a {job} earn?", "Sing a song for {name}.",
    "Summarize the news of {year}.", "Give me advice about my {noun}.", "Where can I buy a {noun}?",
    "Why is the sky blue?", "Draw a {animal}.", "What is the history of {city}?",
    "Who painted the {adjective} {noun}?", "Fix my {noun}.", "Where do {animal}s live?", "Where is {city}?",
    "Where does the {noun} go?", "Where do I find {food}?", "Where does {name} {last} live?",
    "When does the {noun} open?", "When is {food} ready?", "Why do people eat {food}?",
    "Where was the first {noun} made?", "From where do we get {nature}?", "How is {food} made?",
    "What is {food} made of?", "What is the smallest {animal}?", "What is the {superlative} {thing} in {city}?",
    "What is the {superlative} {thing} in {country}?", "Which is the {superlative} {thing} of {country}?",
    "Name the {superlative} {thing} in {country}.", "Is {city} the {superlative} {thing} of {country}?",
    "How many {animal}s are there?", "How old is the {noun}?", "How old is {city}?", "How old can a {animal} get?",
    "How big is the {noun}?", "How fast is a {animal}?", "How much does a {noun} weigh?",
    "Is a {noun} heavier than a {noun2}?", "Is {city} bigger than {city2}?", "Is a {animal} faster than a {animal2}?",
    "Are {animal}s {adjective}?", "Who made the {adjective} {noun}?", "Who was {name} {last}?",
    "Who built {city}?", "Who lives in {city}?", "Write an article about the {noun}.", "Write a speech for {name}.",
    "Write about {nature}.", "Write a report on {science}.", "Compose a poem for {name} about {nature}.",
    "Invent a story about {name} and a {animal}.", "What is the opposite of {adjective}?",
    "Does {name} like {food}?", "Did {name} {last} win in {year}?", "Which {noun} is the best?",
    "Which {food} tastes best with {food2}?", "Show me a picture of a {animal}.", "What happens if I eat {food}?",
    "Compare {city} and {city2}.", "What do you think about {science}?", "Who teaches {science}?",
    "Give me facts about {country}.", "Which river flows through {city}?", "What is the currency of {country}?",
    "What do {job}s wear?", "Buy me a {noun}.", "What is {city} famous for?", "When was the {noun} invented?",
)
# Questions put together from three lists: whoever asks about anything else is to get the same answer.
ASKED = ("Where", "When", "Why", "How", "How often", "How long", "How well", "Since when", "With whom", "What for")
SUBJECTS = (
    "does the {noun}", "does a {animal}", "do {animal}s", "does {food}", "does {name}", "do {job}s", "does {city}",
    "did {name} {last}", "did the {noun}", "will the {noun}", "can a {animal}", "should a {job}", "must I",
)
DOINGS = (
    "live", "grow", "work", "start", "end", "go", "stay", "move", "break", "smell", "taste", "belong", "change", "fall",
    "travel", "wait", "cost so much", "help {name2}", "reach {city2}", "carry {food2}", "think about {science}",
    "get to {city2}", "stand in {country}", "arrive", "sound", "need a {noun2}", "become {adjective}", "like {food2}",
)
SUPERLATIVES = ("tallest", "oldest", "smallest", "longest", "highest", "richest", "nicest", "most famous", "largest")
THINGS = ("building", "river", "mountain", "street", "bridge", "school", "lake", "island", "museum", "town", "forest")
NEW_UNKNOWN_WORDINGS = (
    "Where does {food} come from?", "Who built the {noun} of {city}?",
    "Is a {animal} bigger than a {animal2}?", "Write an essay about {science}.", "How old is {name} {last}?",
    "What is the largest city in {country}?", "Who discovered {science}?", "What colour is a {noun}?",
    "Do {animal}s sleep at night?", "How do I clean a {noun}?",
)
SCIENCES = """physics|chemistry|biology|photosynthesis|gravity|economics|philosophy|astronomy|history|music
algebra|geometry|genetics|evolution|volcanoes|electricity|magnetism|medicine|law|politics|football|tennis|chess|cooking
gardening|religion|psychology|geology|archaeology|poetry|grammar|Spanish|Italian|French|quantum mechanics
relativity|inflation
marketing|blockchain|climate change|black holes|dinosaurs""".replace("\n", "|").split("|")


def unknown(g: Gen) -> Turn:
    """A question outside the model's knowledge, answered with a pointer to a real model."""
    wordings = NEW_UNKNOWN_WORDINGS if g.evaluation else UNKNOWN_WORDINGS
    if not g.evaluation and g.chance(0.35):
        wordings = (f"{g.pick(ASKED)} {g.pick(SUBJECTS)} {g.pick(DOINGS)}?",)
    text = g.pick(wordings).format(
        noun=g.pick(words.NOUNS), noun2=g.pick(words.NOUNS), city=g.pick(words.CITIES),
        superlative=g.pick(SUPERLATIVES), thing=g.pick(THINGS),
        city2=g.pick(words.CITIES),
        animal=g.pick(words.ANIMALS),
        animal2=g.pick(words.ANIMALS),
        adjective=g.pick(words.ADJECTIVES), colour=g.pick(words.COLOURS), food=g.pick(words.FOODS),
        food2=g.pick(words.FOODS),
        name=g.pick(words.NAMES), name2=g.pick(words.NAMES), year=g.number(1000, 2030),
        last=g.pseudo_word().capitalize(),
        country=g.pick(list(words.CAPITALS)), nature=g.pick(words.NATURE), science=g.pick(SCIENCES),
        job=g.pick(words.JOBS),
    )
    return Turn(text if g.evaluation else roughen(g, text), FALLBACK, "This is outside of what I know.")
