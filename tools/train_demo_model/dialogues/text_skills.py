"""Small text skills: count, echo, reverse, spell, sort, add, and the alphabet. Each draws one turn."""

# fmt: off

import string

from dialogues import words
from dialogues.base import Gen, Turn, unicode_text


def count(g: Gen) -> Turn:
    """Count up, down or in steps; count letters and words."""
    thought = "I have to count."
    kind = g.pick(("to", "to", "range", "range", "down", "step", "letters", "words"))
    if kind == "letters":
        word = g.letters_word("count")
        asked = g.wording(
            (
                f"How many letters are in {word}?", f"How many letters are in the word {word}?",
                f"Count the letters in {word}", f'Count the letters of "{word}".',
                f"How many letters does {word} have?", f"Letter count of {word}?",
                f"How long is the word {word}?", f"Please count the letters of {word}.",
                f"Please tell me how many letters {word} has.",
                f"Please count the letters in the word {word}.",
            )
        )
        return Turn(asked, f"{'-'.join(word)}: {len(word)} letters", thought, by_letter=True)
    if kind == "words":
        text = g.fresh("words", lambda: [g.pick(words.WORDS) for _ in range(g.number(2, 9))])
        shown = " ".join(text)
        asked = g.wording(
            (
                f"How many words are in this text: {shown}", f"Count the words: {shown}",
                f"How many words are here? {shown}", f'How many words are in "{shown}"?',
                f"Count the words in: {shown}", f"Please count the words: {shown}",
                f"Count the words in this text: {shown}", f"Please count the words in this text: {shown}",
            )
        )
        return Turn(
            asked,
            "; ".join(f"{i} {word}" for i, word in enumerate(text, 1)) + f": {len(text)} words",
            thought,
        )
    if kind == "to":
        first, step = 1, 1
        last = g.fresh("count-to", lambda: g.length(2, 100))
        options = (
            f"Count to {last}", f"Count to {last}.", f"Please count to {last}.", f"Count up to {last}.",
            f"Can you count to {last}?", f"count to {last}", f"Count from 1 to {last}.",
            f"Count from one to {last}", f"List the numbers from 1 to {last}.",
            f"Write the numbers 1 to {last}.", f"I want you to count to {last}.",
            f"Could you count to {last}?",
            f"Can you please count to {last}?",
            f"Could you please count up to {last}?",
        )
    elif kind == "down":
        step, last = -1, g.pick((1, 1, 1, 0))
        first = g.fresh("count-down", lambda: g.length(3, 40))
        options = (
            f"Count backwards from {first} to {last}", f"Count backwards from {first} to {last}.",
            f"Count down from {first} to {last}.", f"Please count down from {first} to {last}.",
            f"count down from {first} to {last}", f"Countdown from {first} to {last}",
            f"Count from {first} down to {last}.", f"Can you count backwards from {first} to {last}?",
        )
    elif kind == "range":
        step = 1
        first, last = g.fresh("count-range", lambda: (lambda a: (a, a + g.length(2, 30)))(g.number(0, 300)))
        options = (
            f"Count from {first} to {last}", f"Count from {first} to {last}.",
            f"Please count from {first} to {last}.", f"List the numbers from {first} to {last}.",
            f"count from {first} to {last}", f"Write the numbers {first} to {last}.",
            f"Count up from {first} to {last}.", f"Can you count from {first} to {last}?",
            f"Start with {first} and count up to {last}.", f"Starting at {first}, count to {last}.",
            f"Begin at {first} and go up to {last}.", f"Begin with {first} and count to {last}",
            f"Start at {first} and count to {last}.",
        )
    else:
        step, count_of = g.fresh("count-step", lambda: (g.pick((2, 3, 5, 10)), g.length(3, 14)))
        first, last = step, step * count_of
        name = {2: "twos", 3: "threes", 5: "fives", 10: "tens"}[step]
        options = (
            f"Count by {name} to {last}", f"Count by {name} to {last}.", f"Count in {name} up to {last}.",
            f"Count to {last} by {name}.", f"Please count by {name} up to {last}.",
            f"Count up to {last} in {name}.", f"Count by {step} up to {last}.", f"Count to {last} in {name}.",
            f"In steps of {step}, count to {last}.", f"Please count up to {last} in steps of {step}.",
            f"Count in steps of {step} to {last}.", f"Count to {last} in steps of {step}.",
        )
    return Turn(
        g.wording(options), ", ".join(map(str, range(first, last + (1 if step > 0 else -1), step))), thought
    )


def _echo_request(g: Gen, text: str) -> str:
    return g.wording(
        (
            f"Repeat after me: {text}", f"Repeat: {text}", f"Repeat exactly: {text}",
            f"Repeat this text exactly: {text}", f"Echo: {text}", f"Echo this: {text}", f"Say: {text}",
            f"Say exactly: {text}", f"Copy this: {text}", f"Repeat this exactly:\n{text}",
            f"Repeat the following text:\n{text}", f"Copy the following line.\n\n{text}",
            f"Please repeat this text: {text}", f"Please repeat exactly what I write: {text}",
            f'Repeat this text: "{text}"', f'Say "{text}"', f"Repeat after me:\n{text}",
            f"Write this again: {text}", f"Reply with exactly this text: {text}",
            f"Say {text}" if text.replace(" ", "").isalpha() else f"Say this: {text}",
            f"echo {text}", f"Print: {text}", f"Repeat exactly this text and nothing else: {text}",
            f'Repeat exactly: "{text}"', f"Please echo: {text}", f"Echo this text: {text}",
            f"Please say this text: {text}", f"Please copy: {text}", f"Could you repeat this text: {text}",
            f"Please repeat: {text}", f"Echo the text: {text}", f"Please echo this text: {text}",
        )
    )


def echo(g: Gen) -> Turn:
    """Give a text back unchanged, or a word several times."""
    if g.chance(0.12):
        word, times = g.fresh("echo-times", lambda: (g.word(), g.number(2, 10)))
        options = (
            f"Repeat the word {word} {times} times.", f"Say {word} {times} times",
            f"Write {word} {times} times.", f'Repeat "{word}" {times} times',
            f"Say the word {word} {times} times.", f"Please say {word} {times} times.",
            f"Please write {word} {times} times", f"Repeat {word} {times} times.",
            f"Please repeat {word} {times} times.",
        )
        return Turn(g.wording(options), " ".join([word] * times), "I have to repeat a word.")
    text = g.fresh("echo", g.text)
    if g.evaluation and g.chance(0.3):
        text = " ".join(g.sample(words.HELD_OUT_WORDS, g.number(1, 5)))
    return Turn(_echo_request(g, text), text, "I have to repeat the text.")


def unicode_echo(g: Gen) -> Turn:
    """Give a text of emoji and non-Latin characters back unchanged."""
    text = g.fresh("unicode", lambda: unicode_text(g))
    return Turn(_echo_request(g, text), text, "I have to repeat the text.")


def reverse(g: Gen) -> Turn:
    """Reverse a word by letters, or a list by items."""
    if g.chance(0.6 if g.evaluation else 0.75):  # words are harder than lists: practise them more
        word = g.letters_word("reverse")
        options = (
            f"Reverse the word {word}", f"Reverse the word {word}.", f'Reverse the word "{word}".',
            f"Reverse {word}", f"Spell {word} backwards.", f"Write {word} backwards.",
            f"What is {word} backwards?", f"What is {word} reversed?", f"Reverse this word: {word}",
            f"reverse: {word}", f"Please reverse the word {word}.", f'Write the word "{word}" backwards.',
            f"Reverse the letters of {word}.", f"Can you reverse {word}?",
            f"Could you reverse the word {word}?", f"Can you write the word {word} backwards?",
            f"Turn the word {word} around.", f"Can you reverse the word {word}?",
        )
        return Turn(g.wording(options), word[::-1], "I have to reverse the letters.", by_letter=True)
    items = g.fresh("reverse-list", lambda: _items(g, g.number(2, 8)))
    shown = ", ".join(items)
    options = (
        f"Reverse this list: {shown}", f"Reverse the list: {shown}", f"Reverse the list {shown}",
        f"Write this list backwards: {shown}", f"Reverse the order of: {shown}",
        f"Reverse the order of this list: {shown}", f"Give me this list in reverse order: {shown}",
        f"Please reverse this list: {shown}", f"Put these in reverse order: {shown}",
        f"Turn this list around: {shown}", f"Reverse these: {shown}",
        f"Put the following list backwards: {shown}", f"Put this list in reverse order: {shown}",
    )
    return Turn(g.wording(options), ", ".join(items[::-1]), "I have to reverse the list.")


def _items(g: Gen, length: int) -> list[str]:
    draw = g.pick("nwlp")
    if draw == "n":
        return [str(g.number(0, 999)) for _ in range(length)]
    if draw == "l":
        return g.sample(string.ascii_uppercase, length)
    return g.sample(words.NOUNS if draw == "w" else words.NAMES, length)


def spell(g: Gen) -> Turn:
    """Spell a word with hyphens."""
    word = g.letters_word("spell")
    if g.chance(0.15):
        word = word.capitalize()
    options = (
        f"Spell {word}", f"Spell {word}.", f"Spell the word {word}", f"Spell the word {word}.",
        f'Spell the word "{word}".', f"How do you spell {word}?", f"How is {word} spelled?",
        f"Please spell {word}.", f"Can you spell {word}?", f"spell: {word}",
        f"Spell {word} letter by letter.", f"Spell out the word {word}.", f"How do I spell {word}?",
        f"Could you spell {word}?", f"Can you spell the word {word}?", f"Could you please spell {word}?",
        f"Could you spell the word {word}?",
    )
    return Turn(g.wording(options), "-".join(word), "I have to spell the word.", by_letter=True)


def sort(g: Gen) -> Turn:
    """Sort a few numbers or words."""
    if g.chance(0.6):
        high = g.pick((20, 99, 999))
        numbers = g.fresh("sort-numbers", lambda: [g.number(0, high) for _ in range(g.number(2, 7))])
        shown = g.pick((", ", ", ", " ")).join(map(str, numbers))
        descending = g.chance(0.25)
        if descending:
            options = (
                f"Sort these numbers in descending order: {shown}", f"Sort from largest to smallest: {shown}",
                f"Sort in descending order: {shown}", f"Sort these numbers from largest to smallest: {shown}",
                f"Please sort these numbers in descending order: {shown}",
            )
        else:
            options = (
                f"Sort these numbers: {shown}", f"Sort: {shown}", f"Sort {shown}",
                f"Sort these numbers in ascending order: {shown}", f"Sort from smallest to largest: {shown}",
                f"Sort this list: {shown}", f"Sort the numbers {shown}",
                f"Please sort these numbers: {shown}", f"Sort the list {shown}",
                f"Put these numbers in order: {shown}",
                f"Sort these numbers from smallest to largest: {shown}",
                f"Can you sort this list? {shown}", f"Could you sort these numbers? {shown}",
                f"Can you put these numbers in order? {shown}",
                f"Can you sort these numbers? {shown}",
            )
        return Turn(
            g.wording(options),
            ", ".join(map(str, sorted(numbers, reverse=descending))),
            "I have to sort the list.",
        )
    pool = g.pick((words.NOUNS, words.NOUNS, words.NAMES))
    items = g.fresh("sort-words", lambda: g.sample(pool, g.number(2, 6)))
    shown = g.pick((", ", ", ", " ")).join(items)
    options = (
        f"Sort these words: {shown}", f"Sort these words alphabetically: {shown}",
        f"Sort alphabetically: {shown}", f"Sort: {shown}", f"Sort this list: {shown}",
        f"Put these words in alphabetical order: {shown}", f"Sort these words in alphabetical order: {shown}",
        f"Please sort this list of words: {shown}", f"Sort the words {shown}",
        f"Sort this list alphabetically: {shown}", f"Please sort these words: {shown}",
        f"Can you put these words in order? {shown}", f"Could you sort these words? {shown}",
        f"Can you sort this list of words? {shown}", f"Can you sort these words? {shown}",
    )
    return Turn(g.wording(options), ", ".join(sorted(items)), "I have to sort the list.")


def _addition_thought(a: int, b: int) -> str:
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    sum_of_tens = f"{a // 10} + {b // 10}"
    carried = f"carry 1. {sum_of_tens} + 1 = {tens + 1}" if ones > 9 else f"no carry. {sum_of_tens} = {tens}"
    return f"{a % 10} + {b % 10} = {ones}, {carried}. So {a + b}."


def arithmetic(g: Gen) -> Turn:
    """Add and subtract numbers below 100, and the times table up to ten."""
    if not g.evaluation and g.chance(0.08):
        a, b = g.number(0, 10), g.number(0, 10)
        options = (
            f"What is {a} times {b}?", f"What is {a} * {b}?", f"{a} * {b}", f"{a} x {b} = ?",
            f"Multiply {a} by {b}.", f"{a} times {b}",
        )
        return Turn(g.wording(options), f"{a} * {b} = {a * b}", "I know the times table.")
    high = g.pick((12, 99, 99, 99))
    if g.chance(0.65):
        a, b = g.fresh("add", lambda: (g.number(0, high), g.number(0, high)))
        options = (
            f"What is {a} + {b}?", f"What is {a} plus {b}?", f"{a} + {b}", f"{a}+{b}", f"{a} + {b} = ?",
            f"Add {a} and {b}.", f"{a} plus {b}", f"Calculate {a} + {b}.", f"What's {a} + {b}?",
            f"How much is {a} + {b}?", f"Please add {a} to {b}.", f"What is {a} and {b} added?",
            f"What is the sum of {a} and {b}?", f"{a}+{b}=", f"Compute {a} + {b}",
            f"What does {a} + {b} equal?", f"Please add {a} and {b}.", f"How much is {a} plus {b}?",
        )
        return Turn(g.wording(options), f"{a} + {b} = {a + b}", _addition_thought(a, b))
    b, a = sorted(g.fresh("subtract", lambda: (g.number(0, high), g.number(0, high))))
    options = (
        f"What is {a} - {b}?", f"What is {a} minus {b}?", f"{a} - {b}", f"{a}-{b}", f"{a} - {b} = ?",
        f"Subtract {b} from {a}.", f"Calculate {a} - {b}.", f"What's {a} - {b}?", f"How much is {a} - {b}?",
        f"{a} minus {b}", f"Please subtract {b} from {a}.", f"Compute {a} - {b}",
        f"How much do I get for {a} minus {b}?", f"How much is {a} minus {b}?",
    )
    return Turn(g.wording(options), f"{a} - {b} = {a - b}", f"{a} minus {b} leaves {a - b}.")


def alphabet(g: Gen) -> Turn:
    """Continue the alphabet, all of it or a few letters."""
    letters = string.ascii_uppercase if g.chance(0.6) else string.ascii_lowercase
    thought = "I have to continue the alphabet."
    if g.chance(0.05) and not g.evaluation:
        options = (
            "Say the alphabet.", "Recite the alphabet", "What is the alphabet?", "Write the alphabet.",
            "List all letters of the alphabet.",
        )
        return Turn(g.wording(options), ", ".join(string.ascii_uppercase), thought)
    start, shown_count, wanted = g.fresh(
        "alphabet", lambda: (g.number(0, 24), g.number(1, 6), g.number(1, 8))
    )
    end = min(start + shown_count, 25)
    shown = g.pick((", ", " ", ", ")).join(letters[start:end])
    if g.chance(0.3):
        wanted = min(wanted, 26 - end)
        plural = f"{wanted} letter" + "s" * (wanted > 1)
        options = (
            f"Give me the next {plural}: {shown}", f"Continue the alphabet with {plural}: {shown}",
            f"What are the next {plural} after {shown}?", f"Tell me the next {plural}: {shown}",
            f"What comes next? Give me {plural}: {shown}", f"Which are the next {plural}? {shown}",
            f"{shown}: what are the next {plural}?",
            f"Write the next {plural} of the alphabet after {shown}", f"Which {plural} follow? {shown}",
            f"Which {plural} come after these? {shown}", f"Which {plural} come next? {shown}",
        )
        return Turn(g.wording(options), ", ".join(letters[end : end + wanted]), thought)
    if g.chance(0.25):
        letter = letters[end - 1]
        options = (
            f"Which letter comes after {letter}?", f"What letter comes after {letter}?",
            f"What comes after {letter} in the alphabet?", f"What is the next letter after {letter}?",
            f"Tell me the letter after {letter}.", f"Which letter is after {letter}?",
            f"Name the letter that follows {letter}.", f"Which letter follows {letter}?",
            f"Please name the letter after {letter}.", f"What is the letter after {letter}?",
        )
        return Turn(g.wording(options), letters[end], thought)
    options = (
        f"Continue the alphabet: {shown}", f"Continue: {shown}", f"Continue the alphabet from {shown}",
        f"Continue the alphabet: {shown} ...", f"Finish the alphabet: {shown}",
        f"Go on with the alphabet: {shown}", f"Please continue the alphabet: {shown}",
        f"Complete the alphabet: {shown}", f"Please complete the alphabet: {shown}",
        f"Can you continue the alphabet? {shown}", f"Please go on with the alphabet: {shown}",
        f"Please write the rest of the alphabet: {shown}", f"Finish: {shown}", f"Please finish: {shown}",
        f"Please continue: {shown}", f"Can you finish the alphabet? {shown}",
        f"Please finish the alphabet: {shown}",
    )
    return Turn(g.wording(options), ", ".join(letters[end:]), thought)
