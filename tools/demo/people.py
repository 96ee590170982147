"""The people of the small world: their tools, things, bodies, clothes, jobs and feelings."""

from __future__ import annotations

from typing import NamedTuple


class Tool(NamedTuple):
    """A tool and its task, as an infinitive and as a gerund."""

    name: str
    task: str
    doing: str


class MadeThing(NamedTuple):
    """A thing (with its article) and what it is made of."""

    thing: str
    plural: str | None
    material: str


class CountedPart(NamedTuple):
    """A thing (with its article) that has a known number of parts."""

    thing: str
    plural: str
    number: int
    part: str


class BodyPart(NamedTuple):
    """A part of the body, its task as an infinitive and as a gerund, and how many of it a person has."""

    part: str
    is_plural: bool
    task: str
    doing: str
    number: str | None


class GarmentPlace(NamedTuple):
    """Something to wear and the part of the body it is worn on."""

    garment: str
    part: str


class Job(NamedTuple):
    """A job, what it does in the third person and as an infinitive, and where."""

    name: str
    does: str
    do: str
    place: str


class Reason(NamedTuple):
    """A feeling, its reason ({n} in it is the name of who feels it), and what was done about it."""

    feeling: str
    reason: str
    did: str


TOOLS = (
    Tool("a hammer", "hit nails", "hitting nails"),
    Tool("a saw", "cut wood", "cutting wood"),
    Tool("a broom", "sweep the floor", "sweeping the floor"),
    Tool("a mop", "wash the floor", "washing the floor"),
    Tool("a toothbrush", "clean your teeth", "cleaning your teeth"),
    Tool("a comb", "tidy your hair", "tidying your hair"),
    Tool("a needle", "sew clothes", "sewing clothes"),
    Tool("a pen", "write letters", "writing letters"),
    Tool("a pencil", "draw pictures", "drawing pictures"),
    Tool("a ruler", "measure lines", "measuring lines"),
    Tool("a key", "open a lock", "opening a lock"),
    Tool("a torch", "see in the dark", "seeing in the dark"),
    Tool("a spade", "dig holes", "digging holes"),
    Tool("a rake", "gather leaves", "gathering leaves"),
    Tool("a watering can", "water the plants", "watering the plants"),
    Tool("a bucket", "carry water", "carrying water"),
    Tool("a ladder", "reach high places", "reaching high places"),
    Tool("a clock", "tell the time", "telling the time"),
    Tool("a thermometer", "measure the heat", "measuring the heat"),
    Tool("an oven", "bake bread", "baking bread"),
    Tool("a kettle", "boil water", "boiling water"),
    Tool("a fridge", "keep food cold", "keeping food cold"),
    Tool("a towel", "dry yourself", "drying yourself"),
    Tool("a map", "find the way", "finding the way"),
    Tool("a compass", "find north", "finding north"),
    Tool("a telescope", "look at the stars", "looking at the stars"),
    Tool("a camera", "take photographs", "taking photographs"),
    Tool("a telephone", "talk to people far away", "talking to people far away"),
    Tool("a fishing net", "catch fish", "catching fish"),
    Tool("a paintbrush", "paint walls", "painting walls"),
    Tool("a rubber", "rub out mistakes", "rubbing out mistakes"),
    Tool("a spoon", "eat soup", "eating soup"),
    Tool("a knife", "slice bread", "slicing bread"),
    Tool("a fork", "eat noodles", "eating noodles"),
    Tool("an umbrella", "keep off the rain", "keeping off the rain"),
    Tool("an axe", "chop logs", "chopping logs"),
    Tool("a boat", "cross the water", "crossing the water"),
    Tool("a pillow", "rest your head", "resting your head"),
    Tool("a blanket", "keep warm in bed", "keeping warm in bed"),
    Tool("a rope", "tie things together", "tying things together"),
    Tool("a pair of scissors", "cut paper", "cutting paper"),
    Tool("glue", "stick paper", "sticking paper"),
    Tool("soap", "wash your hands", "washing your hands"),
    Tool("a lamp", "light a room", "lighting a room"),
    Tool("a lawnmower", "cut the grass", "cutting the grass"),
    Tool("a pump", "blow up a tyre", "blowing up a tyre"),
)

MADE_THINGS = (
    MadeThing("a window", "windows", "glass"),
    MadeThing("a table", "tables", "wood"),
    MadeThing("a coin", "coins", "metal"),
    MadeThing("a shirt", "shirts", "cotton"),
    MadeThing("a jumper", "jumpers", "wool"),
    MadeThing("a boot", "boots", "leather"),
    MadeThing("a tyre", "tyres", "rubber"),
    MadeThing("a book", "books", "paper"),
    MadeThing("a brick", "bricks", "clay"),
    MadeThing("a toy block", "toy blocks", "plastic"),
    MadeThing("a candle", "candles", "wax"),
    MadeThing("a statue", "statues", "stone"),
    MadeThing("a nail", "nails", "iron"),
    MadeThing("a basket", "baskets", "straw"),
    MadeThing("a crown", "crowns", "gold"),
    MadeThing("a mirror", "mirrors", "glass"),
    MadeThing("a door", "doors", "wood"),
    MadeThing("a scarf", "scarves", "wool"),
    MadeThing("a newspaper", "newspapers", "paper"),
    MadeThing("a castle wall", "castle walls", "stone"),
    MadeThing("a belt", "belts", "leather"),
    MadeThing("a saucepan", "saucepans", "metal"),
    MadeThing("a ribbon", "ribbons", "silk"),
    MadeThing("a teapot", "teapots", "china"),
    MadeThing("a plank", "planks", "wood"),
    MadeThing("a bracelet", "bracelets", "silver"),
    MadeThing("a balloon", "balloons", "rubber"),
    MadeThing("a flowerpot", "flowerpots", "clay"),
    MadeThing("a pencil", "pencils", "wood"),
    MadeThing("a spoon", "spoons", "metal"),
    MadeThing("a towel", "towels", "cotton"),
    MadeThing("an igloo", "igloos", "ice"),
    MadeThing("a snowman", "snowmen", "snow"),
    MadeThing("a sandcastle", "sandcastles", "sand"),
    MadeThing("bread", None, "flour"),
    MadeThing("cheese", None, "milk"),
    MadeThing("butter", None, "cream"),
    MadeThing("jam", None, "fruit"),
    MadeThing("an omelette", "omelettes", "eggs"),
)

MATERIALS = sorted({made.material for made in MADE_THINGS})

COUNTED_PARTS = (
    CountedPart("a bicycle", "bicycles", 2, "wheels"),
    CountedPart("a car", "cars", 4, "wheels"),
    CountedPart("a tricycle", "tricycles", 3, "wheels"),
    CountedPart("a unicycle", "unicycles", 1, "wheel"),
    CountedPart("a triangle", "triangles", 3, "sides"),
    CountedPart("a square", "squares", 4, "sides"),
    CountedPart("a hexagon", "hexagons", 6, "sides"),
    CountedPart("a pentagon", "pentagons", 5, "sides"),
    CountedPart("a week", "weeks", 7, "days"),
    CountedPart("a year", "years", 12, "months"),
    CountedPart("a hand", "hands", 5, "fingers"),
    CountedPart("a foot", "feet", 5, "toes"),
    CountedPart("a spider", "spiders", 8, "legs"),
    CountedPart("an ant", "ants", 6, "legs"),
    CountedPart("a bee", "bees", 6, "legs"),
    CountedPart("a dog", "dogs", 4, "legs"),
    CountedPart("a cow", "cows", 4, "legs"),
    CountedPart("a bird", "birds", 2, "legs"),
    CountedPart("a hen", "hens", 2, "legs"),
    CountedPart("an octopus", "octopuses", 8, "arms"),
    CountedPart("a chair", "chairs", 4, "legs"),
    CountedPart("a pair", "pairs", 2, "things"),
    CountedPart("a dozen", "dozens", 12, "things"),
    CountedPart("a bird", "birds", 2, "wings"),
    CountedPart("a stool", "stools", 3, "legs"),
    CountedPart("a camel", "camels", 4, "legs"),
)

BODY_PARTS = (
    BodyPart("eyes", True, "see", "seeing", "two"),
    BodyPart("ears", True, "hear", "hearing", "two"),
    BodyPart("nose", False, "smell", "smelling", "one"),
    BodyPart("tongue", False, "taste food", "tasting food", "one"),
    BodyPart("hands", True, "hold things", "holding things", "two"),
    BodyPart("legs", True, "walk and run", "walking and running", "two"),
    BodyPart("teeth", True, "chew food", "chewing food", None),
    BodyPart("fingers", True, "touch things", "touching things", "ten"),
    BodyPart("heart", False, "pump blood", "pumping blood", "one"),
    BodyPart("lungs", True, "breathe air", "breathing air", "two"),
    BodyPart("brain", False, "think", "thinking", "one"),
    BodyPart("mouth", False, "speak", "speaking", "one"),
    BodyPart("arms", True, "hug people", "hugging people", "two"),
    BodyPart("feet", True, "stand on the ground", "standing on the ground", "two"),
    BodyPart("toes", True, "balance", "balancing", "ten"),
    BodyPart("stomach", False, "digest meals", "digesting meals", "one"),
    BodyPart("shoulders", True, "carry a bag", "carrying a bag", "two"),
    BodyPart("knees", True, "bend your legs", "bending your legs", "two"),
    BodyPart("elbows", True, "bend your arms", "bending your arms", "two"),
    BodyPart("neck", False, "turn your head", "turning your head", "one"),
)

GARMENT_PLACES = (
    GarmentPlace("hat", "head"),
    GarmentPlace("shoe", "foot"),
    GarmentPlace("glove", "hand"),
    GarmentPlace("ring", "finger"),
    GarmentPlace("scarf", "neck"),
    GarmentPlace("sock", "foot"),
    GarmentPlace("watch", "wrist"),
    GarmentPlace("belt", "waist"),
    GarmentPlace("glasses", "nose"),
    GarmentPlace("helmet", "head"),
)

JOBS = (
    Job("baker", "bakes bread", "bake bread", "in a bakery"),
    Job("farmer", "grows food", "grow food", "on a farm"),
    Job("doctor", "helps sick people", "help sick people", "in a hospital"),
    Job("nurse", "cares for patients", "care for patients", "in a hospital"),
    Job("teacher", "teaches children", "teach children", "in a school"),
    Job("firefighter", "puts out fires", "put out fires", "at a fire station"),
    Job("police officer", "catches thieves", "catch thieves", "at a police station"),
    Job("pilot", "flies planes", "fly planes", "at an airport"),
    Job("bus driver", "drives a bus", "drive a bus", "on the road"),
    Job("sailor", "sails ships", "sail ships", "at sea"),
    Job("fisherman", "catches fish", "catch fish", "at sea"),
    Job("postman", "delivers letters", "deliver letters", "in the street"),
    Job("dentist", "looks after teeth", "look after teeth", "in a clinic"),
    Job("vet", "treats sick animals", "treat sick animals", "in an animal clinic"),
    Job("builder", "builds houses", "build houses", "on a building site"),
    Job("carpenter", "makes things from wood", "make things from wood", "in a workshop"),
    Job("plumber", "mends leaking pipes", "mend leaking pipes", "in people's houses"),
    Job("painter", "paints pictures", "paint pictures", "in a studio"),
    Job("chef", "cooks meals", "cook meals", "in a restaurant"),
    Job("gardener", "plants flowers", "plant flowers", "in a garden"),
    Job("librarian", "lends books", "lend books", "in a library"),
    Job("tailor", "sews clothes", "sew clothes", "in a clothes shop"),
    Job("mechanic", "mends cars", "mend cars", "in a garage"),
    Job("singer", "sings songs", "sing songs", "on a stage"),
    Job("astronaut", "travels into space", "travel into space", "in a rocket"),
    Job("butcher", "sells meat", "sell meat", "in a butcher's shop"),
    Job("barber", "cuts hair", "cut hair", "in a barber's shop"),
    Job("shepherd", "looks after sheep", "look after sheep", "on the hills"),
    Job("author", "writes books", "write books", "at a desk"),
    Job("miner", "digs for coal", "dig for coal", "in a mine"),
    Job("cobbler", "mends shoes", "mend shoes", "in a shoe shop"),
    Job("lifeguard", "keeps swimmers safe", "keep swimmers safe", "at the beach"),
)

REASONS = (
    Reason("happy", "it was {n}'s birthday", "ate a big cake"),
    Reason("sad", "the toy was broken", "began to cry"),
    Reason("tired", "it was very late", "went to bed"),
    Reason("hungry", "there was no breakfast", "ate some bread"),
    Reason("thirsty", "it was a hot day", "drank a glass of water"),
    Reason("cold", "it was snowing", "put on a warm coat"),
    Reason("afraid", "it was dark", "switched on the lamp"),
    Reason("wet", "it was raining", "went home to get dry"),
    Reason("angry", "somebody took the ball", "shouted loudly"),
    Reason("hot", "the sun was shining", "sat under a tree"),
    Reason("sick", "the food was bad", "went to the doctor"),
    Reason("bored", "there was nothing to do", "read a book"),
    Reason("dirty", "the ground was muddy", "had a bath"),
    Reason("lonely", "there was nobody to play with", "looked for a friend"),
    Reason("proud", "the picture was good", "showed it to the teacher"),
    Reason("late", "the bus did not come", "ran to school"),
)
