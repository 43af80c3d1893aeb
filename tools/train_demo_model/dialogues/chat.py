"""Skills that live in a conversation: memory over turns, one-line system prompts, JSON answers."""

# fmt: off

import json

from dialogues import words
from dialogues.base import Dialogue, Gen, Message, Turn, unicode_text
from dialogues.qa import qa, unknown
from dialogues.text_skills import alphabet, arithmetic, count, echo, reverse, sort, spell, unicode_echo

SMALL_TURNS = (
    qa, qa, unknown, count, echo, unicode_echo, reverse, spell, sort, arithmetic, arithmetic, alphabet,
)


def small_turn(g: Gen) -> Turn:
    """A short turn of another skill, to stand between the turns that matter."""
    while True:
        turn = g.pick(SMALL_TURNS)(g)
        if len(turn.answer) < 260:
            return turn


def conversation(turns: list[Turn]) -> list[Message]:
    """The messages of the turns, without the last answer."""
    messages: list[Message] = []
    for turn in turns:
        answer: Message = {"role": "assistant", "content": turn.answer}
        if turn.by_letter:
            answer["by_letter"] = True
        messages += [{"role": "user", "content": turn.user}, answer]
    return messages[:-1]


_NAME_STATEMENTS = (
    "My name is {}.", "My name is {}", "Hi, I'm {}.", "I am {}.", "Hello, my name is {}.",
    "Hi! My name is {}.", "Call me {}.", "I am called {}.", "Hello! I'm {}", "my name is {}",
    "You can call me {}.", "Please call me {}.",
)
_NAME_QUESTIONS = (
    "What is my name?", "What's my name?", "Do you remember my name?", "Tell me my name.", "Who am I?",
    "what is my name", "Do you know my name?", "What was my name?", "What am I called?",
    "Can you tell me my name?",
)
_FACT_STATEMENTS = (
    "My {0} is {1}.", "My {0} is {1}", "By the way, my {0} is {1}.", "Remember that my {0} is {1}.",
    "Please note: my {0} is {1}.", "You should know that my {0} is {1}.",
)
_FACT_QUESTIONS = (
    "What is my {0}?", "What's my {0}?", "Do you remember my {0}?", "Tell me my {0}.", "What was my {0}?",
    "Can you tell me my {0}?", "Do you know my {0}?",
)


def _personal_fact(g: Gen) -> tuple[str, str]:
    attribute, value = g.pick(
        (
            ("favourite colour", g.pick(words.COLOURS)), ("favorite color", g.pick(words.COLOURS)),
            ("job", g.pick(words.JOBS)), ("favourite food", g.pick(words.FOODS)),
            ("favourite animal", g.pick(words.ANIMALS)), ("dog's name", g.name()), ("cat's name", g.name()),
            ("city", g.city()), ("home town", g.city()), ("age", str(g.number(5, 99))),
            ("lucky number", str(g.number(0, 9999))), ("room number", str(g.number(1, 999))),
            ("favourite word", g.word()), ("brother's name", g.name()), ("sister's name", g.name()),
            ("phone number", str(g.number(10000, 9999999))),
        )
    )
    return attribute, value


def memory(g: Gen) -> Dialogue:
    """A name or another fact told earlier in the conversation is asked for after other turns."""
    if g.chance(0.08) and not g.evaluation:
        turns = [small_turn(g) for _ in range(g.number(0, 2))]
        turns.append(Turn(g.wording(_NAME_QUESTIONS), "You have not told me your name yet.", ""))
        return Dialogue("memory", conversation(turns), turns[-1].answer, "The user has not told me.")
    told: list[Turn] = []
    questions: list[Turn] = []
    if g.chance(0.7):
        name = g.fresh("name", g.name)
        request = f" {turn.user}" if g.chance(0.15) and (turn := qa(g)) else ""
        answer = turn.answer if request else f"Nice to meet you, {name}!"
        told.append(
            Turn(
                g.wording(_NAME_STATEMENTS).format(name).rstrip(".") + "." * bool(request) + request,
                answer, "",
            )
        )
        questions.append(Turn(g.wording(_NAME_QUESTIONS), f"Your name is {name}.", ""))
    facts = dict(
        g.fresh("fact", lambda: _personal_fact(g))
        for _ in range(g.pick((0, 1, 1, 2)) if told else g.pick((1, 2)))
    )
    for attribute, value in facts.items():
        told.append(
            Turn(
                g.wording(_FACT_STATEMENTS).format(attribute, value),
                f"I will remember that your {attribute} is {value}.", "",
            )
        )
        questions.append(
            Turn(g.wording(_FACT_QUESTIONS).format(attribute), f"Your {attribute} is {value}.", "")
        )
    turns = []
    for turn in g.sample(told, len(told)):
        turns += [turn] + [small_turn(g) for _ in range(g.pick((0, 0, 1, 1, 2)))]
    for turn in g.sample(questions, g.number(1, len(questions))):
        turns += [small_turn(g) for _ in range(g.pick((0, 0, 0, 1)))] + [turn]
    return Dialogue("memory", conversation(turns), turns[-1].answer, "The user told me before.")


_CAPITALS = (
    "Always answer in capital letters.", "Answer in capital letters only.",
    "Write everything in capital letters.", "You always write in upper case.", "Reply in all caps.",
    "Answer only in upper case.", "Use only capital letters.", "Respond only in upper case.",
    "Use capital letters for every answer.",
    "Respond in capital letters.",
)
_BEGINS = (
    "Begin every reply with {}", "Start every answer with {}", "Always begin your answers with {}",
    "Begin each answer with: {}", "Start each reply with the word {}", "Each reply must begin with {}",
    "Begin all of your answers with the word {}", "Every answer must begin with {}",
)
_ENDS = (
    "End every answer with the word {}.", "End every reply with {}.", "Always end your answers with {}.",
    "Finish every answer with the word {}.", "Each reply must end with {}.", "Close every answer with {}.",
    "All of your answers must end with {}.",
    "End each answer with the word {}.",
)
_YES_NO = (
    "Answer only with yes or no.", "Answer with yes or no.", "Reply only with yes or no.",
    "Only say yes or no.", "You may only answer yes or no.", "Answer yes or no.",
    "Use only yes or no as the answer.", "Answer with yes or no only.",
)
_PERSONA = (
    "Your name is {}.", "You are {}.", "You are {}, a helpful assistant.", "You are an assistant called {}.",
    "You are a helpful assistant named {}.", "Your name is {}. Be polite.",
    "You are {}, a friendly assistant.",
)
_FIXED = (
    "Always reply with exactly: {}", "Answer every message with: {}", "Whatever the user says, answer: {}",
    "Reply to everything with: {}", "No matter what the user writes, reply: {}",
)
_PARROT = (
    "Repeat everything the user says.", "You are a parrot: repeat what the user says.",
    "Repeat the user's message exactly.", "Echo the user's message.",
    "Answer with the same text that the user wrote.", "You are an echo. Repeat each message.",
)
_WHO = (
    "What is your name?", "Who are you?", "What's your name?", "Tell me your name.", "what is your name",
    "Who am I talking to?", "How are you called?",
)


def _yes_no(g: Gen) -> Turn:
    kind = g.number(0, 3)
    if kind == 0:
        a, b = g.fresh("compare", lambda: (g.number(0, 99), g.number(0, 99)))
        larger = g.chance(0.5)
        return Turn(
            f"Is {a} {g.pick(('larger', 'greater')) if larger else 'smaller'} than {b}?",
            "Yes" if (a > b if larger else a < b) else "No",
            "",
        )
    if kind == 1:
        n, even = g.number(0, 999), g.chance(0.5)
        return Turn(
            f"Is {n} an {'even' if even else 'odd'} number?", "Yes" if (n % 2 == 0) == even else "No", ""
        )
    groups = {
        "an animal": words.ANIMALS[1:],
        "a food": words.FOODS, "a colour": words.COLOURS, "a job": words.JOBS,
    }
    group, other = g.pick(list(groups)), g.pick(list(groups))
    noun = g.pick([word for word in groups[other] if other == group or word not in groups[group]])
    article = "" if other in ("a colour", "a food") else "an " if noun[0] in "aeiou" else "a "
    return Turn(f"Is {article}{noun} {group}?", "Yes" if noun in groups[group] else "No", "")


def style(g: Gen) -> Dialogue:
    """A one-line system prompt sets the form of every answer."""
    kind = g.pick(("capitals", "begin", "end", "yes", "persona", "fixed", "parrot", "begin", "end"))
    count_turns = g.pick((1, 1, 1, 2))
    thought = "I follow the instruction of the system prompt."
    if kind == "capitals":
        makers = (echo, echo, spell, arithmetic, qa, sort, reverse) if g.chance(0.7) else (qa,)
        turns = [g.pick(makers)(g) for _ in range(count_turns)]
        turns = [t._replace(answer=t.answer.upper(), by_letter=True) for t in turns]
        return Dialogue(
            "style",
            [_system(g.wording(_CAPITALS)), *conversation(turns)],
            turns[-1].answer,
            thought,
            by_letter=True,
        )
    if kind in ("begin", "end"):
        word = g.fresh(
            "style-word",
            lambda: g.pick(
                (
                    g.word, g.name,
                    lambda: g.word().capitalize(),
                    lambda: "over",
                    lambda: f"{g.word().capitalize()}!",
                )
            )(),
        )
        turns = [
            g.pick((qa, qa, arithmetic, count, echo, sort, alphabet, unknown))(g) for _ in range(count_turns)
        ]
        form = f"{word} {{}}" if kind == "begin" else f"{{}} {word}"
        turns = [t._replace(answer=form.format(t.answer)) for t in turns]
        system = g.wording(_BEGINS if kind == "begin" else _ENDS)
        quoted = f'"{word}"' if g.chance(0.3) else word
        return Dialogue(
            "style",
            [_system(system.format(quoted)), *conversation(turns)],
            turns[-1].answer,
            thought,
            turns[-1].by_letter,
        )
    if kind == "yes":
        turns, system = [_yes_no(g) for _ in range(count_turns)], g.wording(_YES_NO)
    elif kind == "persona":
        name = g.fresh("persona", g.name)
        turns = [g.pick((qa, arithmetic))(g) for _ in range(count_turns - 1)] + [
            Turn(g.wording(_WHO), f"My name is {name}.", "")
        ]
        system = g.wording(_PERSONA).format(name)
    elif kind == "fixed":
        text = g.fresh("style-fixed", lambda: g.text("wsc"))
        turns, system = (
            [small_turn(g)._replace(answer=text, by_letter=False) for _ in range(count_turns)],
            g.wording(_FIXED).format(text),
        )
    else:
        make = lambda: g.fresh("parrot", lambda: g.text() if g.chance(0.7) else unicode_text(g))  # noqa: E731
        turns = [Turn(text, text, "") for text in (make() for _ in range(count_turns))]
        system = g.wording(_PARROT)
    return Dialogue("style", [_system(system), *conversation(turns)], turns[-1].answer, thought)


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def json_answer(g: Gen) -> Dialogue:
    """Facts in plain words are given back as one JSON object with the keys asked for."""
    name, age, city, job = g.fresh("json", lambda: (g.name(), g.number(1, 99), g.city(), g.pick(words.JOBS)))
    item, amount, colour = g.pick(words.NOUNS), g.number(1, 200), g.pick(words.COLOURS)
    values, sentences = g.pick(
        (
            (
                {"name": name, "age": age},
                (
                    f"{name} is {age}", f"{name} is {age} years old.", f"This is {name}, aged {age}.",
                    f"I am {name} and I am {age}.",
                ),
            ),
            (
                {"name": name, "city": city},
                (
                    f"{name} lives in {city}", f"{name} lives in {city}.", f"{name} is from {city}.",
                    f"I am {name} from {city}.",
                ),
            ),
            (
                {"name": name, "job": job},
                (
                    f"{name} is a {job}", f"{name} works as a {job}.", f"{name} is a {job}.",
                    f"My name is {name} and I am a {job}.",
                ),
            ),
            (
                {"name": name, "age": age, "city": city},
                (
                    f"{name} is {age} and lives in {city}", f"{name} is {age} years old and lives in {city}.",
                    f"{name}, {age}, {city}", f"{name} from {city} is {age}.",
                ),
            ),
            (
                {"name": name, "job": job, "city": city},
                (
                    f"{name} is a {job} in {city}", f"{name} works as a {job} in {city}.",
                    f"{name} from {city} is a {job}.", f"{name}, {job}, {city}",
                ),
            ),
            (
                {"item": item, "quantity": amount},
                (
                    f"I need {amount} of item {item}", f"Order {amount} {item}", f"{amount} x {item}",
                    f"Please buy {amount} {item}.",
                ),
            ),
            (
                {"item": item, "price": amount, "colour": colour},
                (
                    f"The {colour} {item} costs {amount}", f"A {colour} {item} for {amount}.",
                    f"{item}, {colour}, {amount}", f"We sell a {colour} {item} at {amount}.",
                ),
            ),
        )
    )
    sentence = g.pick(sentences)
    keys = list(values)
    if g.chance(0.4):
        g.rng.shuffle(keys)
    if g.chance(0.15) and len(keys) > 2:
        keys.pop()
    listed = ", ".join(keys[:-1]) + " and " + keys[-1] if len(keys) > 1 else keys[0]
    asked = g.wording(
        (
            f"Give me JSON with {listed} for: {sentence}", f"Give me a JSON object with {listed}: {sentence}",
            f"Answer as JSON with keys {', '.join(keys)}: {sentence}",
            f"{sentence} Write this as JSON with the keys {listed}.", f"Extract {listed} as JSON: {sentence}",
            f"Extract {listed} as JSON from this text: {sentence}", f"Return JSON with {listed}. {sentence}",
            f"Turn this into JSON with {listed}: {sentence}", f"JSON with {listed} please: {sentence}",
            f"Convert to JSON ({', '.join(keys)}): {sentence}",
            f"Reply only with JSON. Keys: {', '.join(keys)}. Text: {sentence}",
            f"Please write JSON with the keys {listed}: {sentence}", f"Please answer in JSON with {listed}. {sentence}",
            f"Could you give me {listed} as JSON for: {sentence}", f"Please extract {listed} as JSON. {sentence}",
            f"Please give me JSON with the keys {listed} for: {sentence}",
        )
    )
    answer = json.dumps({key: values[key] for key in keys}, ensure_ascii=False)
    return Dialogue("json", [{"role": "user", "content": asked}], answer, "The user wants JSON.")
