"""Word lists that the dialogue generators draw from; plain data, all lower case unless a name."""

# ruff: noqa: SIM905 - a list of words reads best as words
# fmt: off

ANIMALS = """ant bat bear bee bird boar bull camel cat cow crab crow deer dog dolphin donkey dove duck
eagle elephant fish fly fox frog goat goose hare hawk hen horse kangaroo lamb lion lizard mole monkey
moose moth mouse otter owl ox panda parrot pig pony rabbit rat raven robin salmon seal shark sheep snail
snake spider squirrel swan tiger toad trout turtle wasp whale wolf zebra""".split()
FOODS = """almond apple apricot banana basil bean bread butter cabbage cake carrot cheese cherry chocolate
coconut cookie corn cream cucumber date egg fig garlic ginger grape honey jam lemon lentil lime mango
melon milk mint mushroom mustard noodle nut oat olive onion orange papaya pasta peach pear pepper pie
pineapple plum potato pumpkin radish raisin rice salad salt soup spinach sugar tea toast tomato vanilla
vinegar walnut yogurt""".split()
OBJECTS = """anchor arrow axe bag ball barrel basket bed bell bench bicycle blanket boat book bottle bowl
box bridge broom brush bucket button cabin camera candle canoe car carpet chain chair clock coat coin comb
compass cup curtain desk door drum engine envelope fan fence flag flute fork garden gate glass glove
guitar hammer harp hat helmet house jacket jar kettle key kite knife ladder lamp letter lock magnet map
mask mirror nail needle net newspaper oven paddle page paint paper pen pencil piano pillow pipe plate
pocket pot purse rope ruler saddle scarf school ship shirt shoe shovel sofa spoon stamp statue stove table
tent ticket tower train tray truck umbrella vase violin wagon wallet watch wheel whistle window
wire""".split()
NATURE = """autumn bay beach branch breeze cave cliff cloud coast dawn desert dew dust earth evening field
fire flower fog forest frost grass hill ice island jungle lake leaf light lightning meadow moon morning
mountain mud night oak ocean path pebble pine planet plant pond rain rainbow river road rock root rose
sand sea seed shadow sky snow spring star stone storm stream summer sun sunset thunder tree tulip valley
water wave willow wind winter wood""".split()
COLOURS = """red blue green yellow purple pink black white brown grey silver gold crimson violet turquoise
scarlet ivory amber teal indigo""".split()
ADJECTIVES = """big bright brave calm clean clever cold cosy curious dark deep dry early eager empty
famous fast fine firm flat fresh friendly full funny gentle glad grand great happy heavy high hot huge
kind large late lazy light little long loud lovely lucky neat new nice noisy odd old plain polite pretty
proud quick quiet rare rich round rusty sharp shiny short shy silent simple slow small smart smooth soft
sour steady strong sunny sweet tall tame thin tiny tired warm wet wide wild wise young""".split()
VERBS = """asked baked borrowed bought brought built called carried caught chased checked cleaned climbed
closed collected counted covered crossed described drew dropped fed filled fixed followed found gave
guarded heard helped hid held kept kicked left lifted liked lost loved made met moved needed noticed
offered opened packed painted passed picked pulled pushed raised reached remembered repaired saved saw
shared showed sold studied threw touched used visited wanted washed watched wrote""".split()
ADVERBS = """again often slowly quickly quietly today yesterday carefully together alone early late
happily calmly outside""".split()
NAMES = """Ada Adam Aisha Alan Alice Amir Amy Ana Andre Anita Anna Ann Ben Bella Bob Boris Bruno Carla
Carlos Chen Chloe Clara Daniel David Dina Diego Elena Ella Emil Emma Erik Eva Fatima Felix Finn Frank
Freya George Grace Hana Hanna Hans Harry Hugo Ida Igor Ines Ivan Jack James Jane Jasmin Joan John Jonas
Julia Karl Kate Kenji Kim Lara Laura Leo Liam Lina Lisa Louis Lucas Lucy Luna Maria Marie Mark Martin Maya
Mei Mia Milan Mina Mohamed Nadia Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Pedro Peter Petra Priya
Rafael Ravi Rita Robert Rosa Ruth Sam Samir Sara Simon Sofia Sophie Stefan Tara Theo Thomas Tim Tina Tom
Vera Victor Wei Yara Yuki Yusuf Zoe""".split()
CITIES = """Accra Amsterdam Athens Baku Bangkok Barcelona Berlin Bogota Bonn Boston Bremen Brussels
Budapest Cairo Chicago Cologne Copenhagen Dakar Dallas Delhi Denver Dublin Dubai Geneva Genoa Ghent
Glasgow Hamburg Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid
Manila Miami Milan Montreal Moscow Munich Mumbai Nairobi Naples Osaka Oslo Paris Perth Porto Prague Quito
Riga Rome Rotterdam Santiago Seattle Seoul Seville Singapore Sofia Stockholm Sydney Tallinn Tokyo Toronto
Tunis Turin Valencia Vienna Vilnius Warsaw Zagreb Zurich""".split()
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest",
    "Ireland": "Dublin", "Belgium": "Brussels", "Canada": "Ottawa", "Brazil": "Brasilia", "Peru": "Lima",
    "Cuba": "Havana", "Thailand": "Bangkok", "Vietnam": "Hanoi", "South Korea": "Seoul",
    "Australia": "Canberra", "Russia": "Moscow", "Ukraine": "Kyiv", "England": "London",
    "the United Kingdom": "London", "the United States": "Washington, D.C.",
}
JOBS = """actor baker barber builder carpenter chef clerk dancer dentist doctor driver engineer farmer
gardener judge lawyer librarian miner nurse painter pilot plumber poet porter sailor singer tailor teacher
waiter writer""".split()
PEOPLE_NOUNS = """baker captain child doctor farmer friend gardener king merchant miller neighbour painter
pilot poet queen sailor shepherd student teacher traveller""".split()

NOUNS = ANIMALS + FOODS + OBJECTS + NATURE
WORDS = sorted({*NOUNS, *COLOURS, *ADJECTIVES, *VERBS, *ADVERBS, *JOBS})

# Real words that neither the training dialogues nor the tokenizer's corpus contain; the evaluation uses them.
HELD_OUT_WORDS = """badger blossom canyon cedar cobalt cricket dagger dragon ember falcon feather glacier
granite harbor hazel heron jasmine lantern lobster marble maple meteor nectar orchid oyster pebbles
pepperoni pigeon prairie quartz raccoon rocket saffron sparrow sunflower thistle thunderbolt trumpet
tundra velvet volcano walrus""".split()
