"""All skills of the demo model and how often each is drawn."""

# fmt: off

from collections.abc import Callable

from dialogues.base import Dialogue, Gen, Message, Turn, held_out
from dialogues.chat import conversation, json_answer, memory, small_turn, style
from dialogues.qa import ENTRIES, qa, unknown
from dialogues.recall import filler, recall
from dialogues.text_skills import alphabet, arithmetic, count, echo, reverse, sort, spell, unicode_echo
from dialogues.tools import tools

__all__ = ["MIX", "SKILLS", "Dialogue", "Gen", "Message", "Turn", "draw", "held_out"]

NEUTRAL_SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant.", "Answer clearly and briefly.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "Be brief.",
    "You are a friendly assistant.", "Answer the user's questions.",
    "You are an expert in inference engineering.", "You are a concise assistant.", "Be helpful and polite.",
    "You are an AI assistant.", "Help the user.", "You are a knowledgeable teacher.", "Reply in English.",
    "You are a helpful, honest and harmless assistant. Answer in one or two sentences.", "Answer concisely.",
)
TURN_SKILLS: dict[str, Callable[[Gen], Turn]] = {
    "qa": qa,
    "unknown": unknown,
    "count": count,
    "echo": echo,
    "unicode": unicode_echo,
    "reverse": reverse,
    "spell": spell,
    "sort": sort,
    "arithmetic": arithmetic,
    "alphabet": alphabet,
}
DIALOGUE_SKILLS: dict[str, Callable[[Gen], Dialogue]] = {
    "recall": recall,
    "memory": memory,
    "style": style,
    "tools": tools,
    "json": json_answer,
}

# Share of dialogues, in per cent. "continue" is plain text without the chat format.
MIX = {
    "qa": 21, "unknown": 8, "count": 4, "echo": 6, "unicode": 3, "reverse": 12, "spell": 8, "sort": 3,
    "arithmetic": 3, "alphabet": 2, "recall": 5, "memory": 3, "style": 8, "tools": 8, "json": 3,
    "thinking": 2, "continue": 1,
}
SKILLS = tuple(MIX)

# What may stand before a request and changes nothing.
LEADS = (
    "Hi! ", "Hello. ", "Now: ", "Next: ", "OK, now: ", "A small task: ", "Here is a task. ", "Thanks! ", "Great. ",
    "One more: ", "Task: ", "Hey, ", "And now this: ", "Another one. ",
)

PROVERBS = (
    "The quick brown fox jumps over the lazy dog.", "The early bird catches the worm.",
    "A journey of a thousand miles begins with a single step.", "All that glitters is not gold.",
    "Actions speak louder than words.", "Practice makes perfect.", "Better late than never.",
    "Once upon a time there was a small model.",
)


def _continuation(g: Gen) -> Dialogue:
    """Plain text: a known sentence, the numbers or the alphabet, to be continued."""
    kind = g.number(0, 3)
    if kind == 0:
        text, least = g.pick(PROVERBS), 10
    elif kind == 1:
        text, least = g.pick(ENTRIES).answer, 24
    elif kind == 2:
        start = g.number(0, 60)
        text, least = g.pick((", ", " ")).join(map(str, range(start, start + 12))), 10
    else:
        text, least = g.pick((" ", ", ")).join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 5
    cuts = [i for i in range(min(least, len(text) - 2), len(text) - 1) if text[i] == " "]
    cut = g.pick(cuts) if cuts else text.rindex(" ")
    return Dialogue("continue", [{"role": "user", "content": text[:cut]}], text[cut:], raw=True)


def _lead(g: Gen) -> str:
    return g.pick(LEADS) if not g.evaluation and g.chance(0.12) else ""


def _plain(g: Gen, skill: str, make: Callable[[Gen], Turn]) -> Dialogue:
    """A single turn, sometimes after other turns and below a system prompt that changes nothing."""
    turn = make(g)
    if skill not in ("qa", "unknown"):
        turn = turn._replace(user=_lead(g) + turn.user)
    before = [small_turn(g) for _ in range(g.number(1, 3))] if g.chance(0.15) else []
    return Dialogue(skill, conversation([*before, turn]), turn.answer, turn.thought, turn.by_letter)


def draw(g: Gen, skill: str, max_characters: int = 6500) -> Dialogue:
    """A dialogue of the skill, with the system prompts and thinking that real requests bring along."""
    if skill == "continue":
        return _continuation(g)
    if skill == "recall":
        dialogue = recall(g, max_characters)
    elif skill in DIALOGUE_SKILLS:
        dialogue = DIALOGUE_SKILLS[skill](g)
        if skill == "json":
            dialogue.messages[-1]["content"] = _lead(g) + dialogue.messages[-1]["content"]
    else:
        dialogue = _plain(g, skill, arithmetic if skill == "thinking" else TURN_SKILLS[skill])
    if skill not in ("style", "tools") and dialogue.messages[0]["role"] != "system" and g.chance(0.4):
        system = g.pick(NEUTRAL_SYSTEM)
        if g.chance(0.08) and max_characters > 4000:
            system += " " + " ".join(filler(g, g.number(100, 5500)))
        dialogue.messages.insert(0, {"role": "system", "content": system})
    dialogue.thinking = skill == "thinking" or (not g.evaluation and g.chance(0.15))
    return dialogue
