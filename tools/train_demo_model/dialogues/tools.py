"""Tool calls: the right function of several offered ones, with arguments from the user's words."""

# fmt: off

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dialogues import words
from dialogues.base import Dialogue, Gen, Message
from dialogues.chat import small_turn

Sampler = Callable[[Gen], Any]


@dataclass(frozen=True)
class Parameter:
    """One argument: names it may go by, its JSON type and how a value is drawn."""

    names: tuple[str, ...]
    sample: Sampler
    kind: str = "string"
    description: str = ""


@dataclass(frozen=True)
class Tool:
    """A function family: names, descriptions and requests with one slot for each parameter."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    requests: tuple[str, ...]
    parameters: tuple[Parameter, ...] = ()


def _fresh(kind: str, make: Sampler) -> Sampler:
    return lambda g: g.fresh(f"tool-{kind}", lambda: make(g))


def _integer(low: int, high: int) -> Sampler:
    return lambda g: g.number(low, high)


CITY = Parameter(
    ("city", "location", "place", "town"), _fresh("city", Gen.city), description="The name of the city"
)
PERSON = Parameter(
    ("name", "to", "recipient", "person"), _fresh("person", Gen.name), description="The name of the person"
)
TEXT = Parameter(
    ("text", "message", "content", "body"),
    _fresh("text", lambda g: " ".join(g.pick(words.WORDS) for _ in range(g.number(1, 5)))),
)
WORD = Parameter(("word", "term", "query", "q"), _fresh("word", Gen.word), description="The word to look up")
ITEM = Parameter(("item", "product", "name"), _fresh("item", lambda g: g.pick(words.NOUNS)))
ROOM = Parameter(
    ("room", "area", "place"),
    lambda g: g.pick(("kitchen", "bedroom", "garden", "bathroom", "office", "hall", "cellar", "garage")),
)

TOOLS = (
    Tool(
        ("get_weather", "weather", "get_current_weather", "fetch_weather", "weather_lookup"),
        ("Get the current weather in a city.", "Get the weather", "Returns the weather for a place."),
        (
            "What is the weather in {}?", "What's the weather like in {}?", "How is the weather in {}?",
            "Weather in {}", "Tell me the weather in {}.", "Is it raining in {}?",
            "Will I need a coat in {}?", "Get the weather for {}.",
        ),
        (CITY,),
    ),
    Tool(
        ("get_time", "current_time", "get_local_time", "clock"),
        ("Get the current time in a city.", "Returns the local time of a place."),
        (
            "What time is it in {}?", "What is the time in {}?", "Tell me the time in {}.", "Time in {}",
            "How late is it in {}?",
        ),
        (CITY,),
    ),
    Tool(
        ("now", "get_date", "current_date", "today"), ("Get the current date.", "Returns today's date."),
        (
            "What is the date today?", "Which day is it today?", "What date is it?", "Tell me today's date.",
            "What day is today?",
        ),
    ),
    Tool(
        ("add", "add_numbers", "sum", "calculate_sum"),
        ("Add two numbers.", "Returns the sum of two numbers."),
        (
            "Add {} and {}.", "What is {} plus {}?", "What is {} + {}?", "Calculate {} + {}.",
            "Use the tool to add {} and {}.",
        ),
        (
            Parameter(("a", "x", "first"), _fresh("a", _integer(0, 9999)), "integer"),
            Parameter(("b", "y", "second"), _integer(0, 9999), "integer"),
        ),
    ),
    Tool(
        ("multiply", "multiply_numbers", "product", "mul"),
        ("Multiply two numbers.", "Returns the product of two numbers."),
        (
            "Multiply {} by {}.", "What is {} times {}?", "Calculate {} * {}.",
            "What is the product of {} and {}?", "{} times {}",
        ),
        (
            Parameter(("a", "x", "first"), _fresh("a", _integer(0, 9999)), "integer"),
            Parameter(("b", "y", "second"), _integer(0, 9999), "integer"),
        ),
    ),
    Tool(
        ("send_message", "send_email", "send_text", "message_person"),
        ("Send a message to a person.", "Sends a text to someone."),
        (
            "Send {} the message: {}", "Tell {} this: {}", "Write to {}: {}", "Send a message to {}: {}",
            "Text {}: {}",
        ),
        (PERSON, TEXT),
    ),
    Tool(
        ("set_alarm", "create_alarm", "alarm"), ("Set an alarm at an hour.", "Creates an alarm."),
        (
            "Set an alarm for {} o'clock.", "Wake me at {}.", "Set the alarm to {}.",
            "Please set an alarm at {}.", "I need an alarm at {}.", "Alarm for {}", "Alarm at {} please.",
        ),
        (Parameter(("hour", "time", "at"), _integer(0, 23), "integer"),),
    ),
    Tool(
        ("set_timer", "start_timer", "timer"), ("Start a timer.", "Starts a timer for some minutes."),
        (
            "Set a timer for {} minutes.", "Start a timer of {} minutes.", "Timer for {} minutes",
            "Remind me in {} minutes.", "Count {} minutes.", "Start a countdown of {} minutes.",
            "Count down {} minutes.",
        ),
        (Parameter(("minutes", "duration", "length"), _integer(1, 120), "integer"),),
    ),
    Tool(
        ("turn_on_light", "light_on", "switch_on_light"),
        ("Turn on the light in a room.", "Switches the light of a room on."),
        (
            "Turn on the light in the {}.", "Light on in the {}, please.", "Switch on the {} light.",
            "It is dark in the {}.", "Turn the {} light on.",
        ),
        (ROOM,),
    ),
    Tool(
        ("turn_off_light", "light_off", "switch_off_light"),
        ("Turn off the light in a room.", "Switches the light of a room off."),
        (
            "Turn off the light in the {}.", "Light off in the {}, please.", "Switch off the {} light.",
            "It is too bright in the {}.", "Turn the {} light off.",
        ),
        (ROOM,),
    ),
    Tool(
        ("set_temperature", "set_heating", "thermostat"),
        ("Set the temperature of a room.", "Heats a room to a temperature."),
        (
            "Set the {} to {} degrees.", "Heat the {} to {} degrees.", "Make the {} {} degrees warm.",
            "I want the {} at {} degrees.", "{}: {} degrees please",
        ),
        (ROOM, Parameter(("degrees", "temperature", "celsius"), _integer(10, 30), "integer")),
    ),
    Tool(
        ("search", "web_search", "search_web", "find"), ("Search the web.", "Looks something up on the web."),
        (
            "Search for {}.", "Search the web for {}.", "Look up {} on the web.",
            "Find something about {} on the web.", "Search {}", "Web search: {}", "Look for {}.", "Google {}",
        ),
        (WORD,),
    ),
    Tool(
        ("define", "dictionary", "get_definition", "lookup_word"),
        ("Look up a word in the dictionary.", "Returns the definition of a word."),
        (
            "Define the word {}.", "Look up {} in the dictionary.", "What does the word {} mean?",
            "Definition of {}", "Give me the definition of {}.", "Find out what {} means.",
            "Find the definition of {}.",
        ),
        (WORD,),
    ),
    Tool(
        ("translate", "translate_text", "translator"),
        ("Translate a text.", "Translates text into a language."),
        (
            "Translate into {}: {}", "Say this in {}: {}", "Translate this to {}: {}", "In {}, please: {}",
            "Turn this into {}: {}", "Give me this in {}: {}", "Put the following text in {}: {}",
            "Put this into {}: {}",
        ),
        (
            Parameter(
                ("language", "target", "to"),
                lambda g: g.pick(
                    ("German", "French", "Spanish", "Italian", "Polish", "Greek", "Dutch", "Czech")
                ),
            ),
            TEXT,
        ),
    ),
    Tool(
        ("buy", "order_item", "add_to_cart", "order"),
        ("Order some pieces of an item.", "Puts an item into the shopping cart."),
        (
            "Order {} pieces of {}.", "Buy {} of the item {}.", "I want to buy {} pieces of {}.",
            "Put {} of {} in my cart.", "Please buy {} x {}.", "Order {} x {}.",
            "Please get me {} of {}.", "Please order {} x {}.",
        ),
        (Parameter(("quantity", "count", "amount"), _integer(1, 99), "integer"), ITEM),
    ),
    Tool(
        ("get_price", "price", "lookup_price"), ("Get the price of an item.", "Returns what an item costs."),
        (
            "What does the {} cost?", "How much is the {}?", "What is the price of the {}?", "Price of {}",
            "Give me the price of the {}.", "Find out what the {} costs.",
            "Tell me the price of the {}.",
        ),
        (ITEM,),
    ),
    Tool(
        ("book_flight", "find_flight", "search_flights"),
        ("Book a flight between two cities.", "Finds a flight."),
        (
            "Book a flight from {} to {}.", "I want to fly from {} to {}.", "Find a flight from {} to {}.",
            "Get me a flight from {} to {}.",
            "I need to go from {} to {}.",
            "Flights from {} to {}", "Fly me from {} to {}.",
        ),
        (
            Parameter(("origin", "source", "departure"), _fresh("city", Gen.city)),
            Parameter(("destination", "target", "arrival"), Gen.city),
        ),
    ),
    Tool(
        ("play_music", "play", "play_artist"), ("Play music by an artist.", "Starts music."),
        (
            "Play something by {}.", "Play music by {}.", "I want to hear {}.", "Put on {}, please.",
            "Play me {}.", "Please play {}.",
            "Play some {}.",
        ),
        (Parameter(("artist", "by", "musician"), _fresh("person", Gen.name)),),
    ),
    Tool(
        ("stop_music", "pause_music", "stop"), ("Stop the music.", "Stops what is playing."),
        ("Stop the music.", "Please stop the music.", "Turn the music off.", "No more music.",
         "Music, stop.", "Switch the music off.", "Music off"),
    ),
    Tool(
        ("list_files", "ls", "get_files"), ("List the files.", "Returns the names of all files."),
        (
            "List the files.", "Which files are there?", "Show me all files.", "List all files.",
            "What files do I have?",
        ),
    ),
    Tool(
        ("get_battery", "battery_level", "battery"),
        ("Get the battery level.", "Returns how full the battery is."),
        (
            "How full is the battery?", "What is the battery level?", "Is the battery full?",
            "Check the battery.", "Battery status?", "Tell me the battery level.", "How is the battery?",
            "Battery level?",
        ),
    ),
    Tool(
        ("read_file", "open_file", "get_file"), ("Read a file.", "Returns the contents of a file."),
        ("Read the file {}.", "Open {}.", "Show me the file {}.", "What is in the file {}?",
         "Please read {}.", "Read me {}.", "Read {}."),
        (
            Parameter(
                ("path", "file", "filename"),
                lambda g: f"{g.word()}.{g.pick(('txt', 'md', 'py', 'json', 'csv'))}",
            ),
        ),
    ),
    Tool(
        ("roll_dice", "roll_die", "dice"), ("Roll a die.", "Rolls a die with some sides."),
        (
            "Roll a die with {} sides.", "Roll a {}-sided die.", "Throw a die that has {} sides.",
            "Roll a die of {} sides for me.", "I have a die with {} sides, throw it.",
            "Please roll a die with {} sides.", "Die with {} sides, roll it.",
        ),
        (Parameter(("sides", "faces", "n"), _integer(2, 100), "integer"),),
    ),
)


def _invented(g: Gen) -> Tool:
    """A function that no one has seen, asked for by its name."""
    noun = g.pseudo_word()
    name = f"{g.pick(('get', 'set', 'run', 'make', 'open', 'check', 'start', 'find'))}_{noun}"
    title = f"{g.pick(('Does something with', 'Works on', 'Handles', 'Manages'))} the {noun}."
    parameters = tuple(
        Parameter(
            (g.pick(("id", "level", "size", "mode", "label", "target", "value", "key")) + str(i) * (i > 0),),
            *g.pick(((Gen.word, "string"), (_integer(0, 999), "integer"))),
        )
        for i in range(g.pick((0, 1, 1, 2)))
    )
    told = " and ".join(f"{p.names[0]} {{}}" for p in parameters)
    requests = (f"Call {name}", f"Use {name}", f"Please call {name}", f"Run {name}")
    requests += (f"Use the function {name}", f"Call the tool {name}", f"Please use {name}", f"Run the tool {name}")
    requests += (f"I need you to call {name}", f"Use the tool {name}")
    return Tool(
        (name,), (title,), tuple(f"{r} with {told}." if parameters else f"{r}." for r in requests), parameters
    )


@dataclass
class Offer:
    """A tool as offered in one dialogue: chosen names, its schema, and a request with its call."""

    schema: dict[str, Any]
    request: str
    call: dict[str, Any]


def offer(g: Gen, tool: Tool) -> Offer:
    """Choose names and values for a tool."""
    name = g.pick(tool.names)
    taken: list[str] = []
    for parameter in tool.parameters:
        taken.append(g.pick([n for n in parameter.names if n not in taken]))
    values = [parameter.sample(g) for parameter in tool.parameters]
    properties = {}
    for chosen, parameter in zip(taken, tool.parameters, strict=True):
        properties[chosen] = {"type": parameter.kind}
        if parameter.description and g.chance(0.5):
            properties[chosen]["description"] = parameter.description
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if properties and g.chance(0.8):
        parameters["required"] = taken
    if g.chance(0.1):
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {
        "name": name,
        "description": g.pick(tool.descriptions),
        "parameters": parameters,
    }
    if g.chance(0.15):
        del function["description"]
    if g.chance(0.25):
        keys = g.sample(list(function), len(function))
        function = {key: function[key] for key in keys}
    if g.chance(0.1):
        function["strict"] = g.pick((True, False))
    request = g.wording(tool.requests).format(*values)
    arguments = dict(zip(taken, values, strict=True))
    return Offer({"type": "function", "function": function}, request, {"name": name, "arguments": arguments})


def _call_message(calls: list[dict[str, Any]]) -> Message:
    return {
        "role": "assistant", "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _value(g: Gen) -> Any:
    """A number, a word, a city, a time of day or a decimal number."""
    return g.pick(
        (
            g.number(0, 999), g.word(), g.city(), f"{g.number(0, 23):02}:{g.number(0, 59):02}",
            g.number(1, 999) / g.pick((10, 100)),
        )
    )


def _result(g: Gen) -> tuple[str, str]:
    """What a tool returned and how the assistant tells it."""
    if g.chance(0.4):
        text = g.fresh("result", lambda: g.text("ws") if g.chance(0.6) else str(_value(g)))
        return text, f"The result is: {text}"
    keys = g.sample(
        (
            "temperature", "sky", "time", "price", "status", "count", "name", "total", "wind", "level",
            "result", "unit", "city",
        ),
        g.number(1, 3),
    )
    values = [g.fresh("result", lambda: _value(g)) for _ in keys]
    told = ", ".join(f"{key} {value}" for key, value in zip(keys, values, strict=True))
    return json.dumps(dict(zip(keys, values, strict=True)), ensure_ascii=False), f"The result is: {told}"


def tools(g: Gen) -> Dialogue:
    """Tools are offered: call one, call two, tell a result, or answer without them."""
    known = g.sample(TOOLS, g.pick((1, 1, 2, 2, 3, 4)))
    families = [_invented(g) if g.chance(0.2) else tool for tool in known]
    offers = [offer(g, family) for family in families]
    names = [o.call["name"] for o in offers]
    if len(set(names)) < len(names):
        return tools(g)
    schemas = [o.schema for o in offers]
    chosen = offers[0]
    g.rng.shuffle(schemas)
    kind = g.pick(("call", "call", "call", "two", "same", "result", "result", "none"))
    messages: list[Message] = []
    if g.chance(0.4):
        messages.append(
            {
                "role": "system",
                "content": g.pick(
                    (
                        "You are a helpful assistant.", "You are a helpful assistant.", "Use the tools.",
                        "Answer briefly.",
                    )
                ),
            }
        )
    if kind == "none":
        turn = small_turn(g)
        messages.append({"role": "user", "content": turn.user})
        return Dialogue("tools", messages, turn.answer, "No tool is needed.", turn.by_letter, schemas)
    calls, request = [chosen.call], chosen.request
    if kind == "two" and len(offers) > 1:
        calls = [chosen.call, offers[1].call]
        joined = chosen.request + (" " if chosen.request[-1] in ".?" else ". ")
        request = joined + g.pick(("Also: ", "", "And then: ")) + offers[1].request
    elif kind == "same" and families[0].parameters == (CITY,):
        ((parameter, first),) = chosen.call["arguments"].items()
        other = CITY.sample(g)
        request = request.replace(first, f"{first} and {g.pick(('', 'in '))}{other}")
        calls = [chosen.call, {"name": chosen.call["name"], "arguments": {parameter: other}}]
    messages.append({"role": "user", "content": request})
    if kind != "result":
        return Dialogue(
            "tools", messages, "", f"I call {' and '.join(c['name'] for c in calls)}.",
            tools=schemas,
            tool_calls=calls,
        )
    content, told = _result(g)
    messages += [_call_message(calls), {"role": "tool", "content": content}]
    return Dialogue("tools", messages, told, "The tool has answered.", tools=schemas)
