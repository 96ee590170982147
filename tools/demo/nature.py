"""The nature of the small world: coloured things, animals, food, weather and seasons."""

from __future__ import annotations

from typing import NamedTuple


class ColouredThing(NamedTuple):
    """A thing of one colour; without a plural it takes no article ("snow", "the sky")."""

    thing: str
    plural: str | None
    colour: str


class Animal(NamedTuple):
    """An animal; `calls` is what it does to make itself heard ("moos"), `sound` what it says ("moo").

    These and `baby` are empty when the small world has no word for it.
    """

    name: str
    plural: str
    calls: str
    sound: str
    home: str
    food: str
    baby: str


class FoodKind(NamedTuple):
    """A fruit or a vegetable."""

    food: str
    plural: str
    kind: str


class FoodSource(NamedTuple):
    """Where a food comes from: an animal, a plant or a place."""

    food: str
    source: str


class MealDish(NamedTuple):
    """A dish and the meal it is eaten at."""

    food: str
    is_plural: bool
    meal: str


class Taste(NamedTuple):
    """A food and its taste."""

    food: str
    is_plural: bool
    taste: str


class WeatherClothes(NamedTuple):
    """Two garments for a kind of weather."""

    condition: str
    garments: tuple[str, str]


class WeatherFact(NamedTuple):
    """A sentence about the weather with its question and answer."""

    fact: str
    question: str
    answer: str


class SeasonFact(NamedTuple):
    """The weather of a season and what happens in it."""

    season: str
    weather: str
    event: str


COLOURED_THINGS = (
    ColouredThing("banana", "bananas", "yellow"),
    ColouredThing("lemon", "lemons", "yellow"),
    ColouredThing("strawberry", "strawberries", "red"),
    ColouredThing("tomato", "tomatoes", "red"),
    ColouredThing("cherry", "cherries", "red"),
    ColouredThing("carrot", "carrots", "orange"),
    ColouredThing("pumpkin", "pumpkins", "orange"),
    ColouredThing("frog", "frogs", "green"),
    ColouredThing("leaf", "leaves", "green"),
    ColouredThing("cucumber", "cucumbers", "green"),
    ColouredThing("pea", "peas", "green"),
    ColouredThing("lime", "limes", "green"),
    ColouredThing("plum", "plums", "purple"),
    ColouredThing("crow", "crows", "black"),
    ColouredThing("swan", "swans", "white"),
    ColouredThing("elephant", "elephants", "grey"),
    ColouredThing("flamingo", "flamingos", "pink"),
    ColouredThing("pig", "pigs", "pink"),
    ColouredThing("polar bear", "polar bears", "white"),
    ColouredThing("sunflower", "sunflowers", "yellow"),
    ColouredThing("fire engine", "fire engines", "red"),
    ColouredThing("tree trunk", "tree trunks", "brown"),
    ColouredThing("blueberry", "blueberries", "blue"),
    ColouredThing("mouse", "mice", "grey"),
    ColouredThing("chick", "chicks", "yellow"),
    ColouredThing("rose", "roses", "red"),
    ColouredThing("ladybird", "ladybirds", "red"),
    ColouredThing("tyre", "tyres", "black"),
    ColouredThing("snow", None, "white"),
    ColouredThing("milk", None, "white"),
    ColouredThing("grass", None, "green"),
    ColouredThing("coal", None, "black"),
    ColouredThing("chocolate", None, "brown"),
    ColouredThing("mud", None, "brown"),
    ColouredThing("gold", None, "yellow"),
    ColouredThing("salt", None, "white"),
    ColouredThing("blood", None, "red"),
    ColouredThing("honey", None, "golden"),
    ColouredThing("the sky", None, "blue"),
    ColouredThing("the sea", None, "blue"),
    ColouredThing("the sun", None, "yellow"),
    ColouredThing("soot", None, "black"),
    ColouredThing("flour", None, "white"),
    ColouredThing("lavender", None, "purple"),
)

ANIMALS = (
    Animal("cow", "cows", "moos", "moo", "on a farm", "grass", "calf"),
    Animal("dog", "dogs", "barks", "woof", "in a kennel", "bones", "puppy"),
    Animal("cat", "cats", "meows", "meow", "in a house", "fish", "kitten"),
    Animal("sheep", "sheep", "bleats", "baa", "in a field", "grass", "lamb"),
    Animal("pig", "pigs", "oinks", "oink", "in a sty", "turnips", "piglet"),
    Animal("horse", "horses", "neighs", "neigh", "in a stable", "hay", "foal"),
    Animal("duck", "ducks", "quacks", "quack", "on a pond", "pondweed", "duckling"),
    Animal("hen", "hens", "clucks", "cluck", "in a henhouse", "corn", "chick"),
    Animal("rooster", "roosters", "crows", "cock-a-doodle-doo", "in a farmyard", "corn", ""),
    Animal("lion", "lions", "roars", "roar", "on the savanna", "meat", "cub"),
    Animal("tiger", "tigers", "roars", "roar", "in the jungle", "meat", "cub"),
    Animal("wolf", "wolves", "howls", "howl", "in the forest", "meat", "cub"),
    Animal("bear", "bears", "growls", "grrr", "in a cave", "honey", "cub"),
    Animal("frog", "frogs", "croaks", "ribbit", "in a pond", "flies", "tadpole"),
    Animal("bee", "bees", "buzzes", "buzz", "in a hive", "nectar", ""),
    Animal("owl", "owls", "hoots", "hoo", "in a hollow tree", "mice", "owlet"),
    Animal("snake", "snakes", "hisses", "hiss", "in the desert", "mice", ""),
    Animal("mouse", "mice", "squeaks", "squeak", "in a hole in the wall", "cheese", ""),
    Animal("sparrow", "sparrows", "chirps", "tweet", "in a nest", "worms", "chick"),
    Animal("monkey", "monkeys", "chatters", "ooh-ooh", "in the jungle", "bananas", ""),
    Animal("elephant", "elephants", "trumpets", "toot", "on the savanna", "leaves", "calf"),
    Animal("donkey", "donkeys", "brays", "hee-haw", "on a farm", "hay", "foal"),
    Animal("goat", "goats", "bleats", "meh", "on a mountain", "grass", "kid"),
    Animal("turkey", "turkeys", "gobbles", "gobble", "on a farm", "seeds", ""),
    Animal("crow", "crows", "caws", "caw", "in a tall tree", "seeds", ""),
    Animal("parrot", "parrots", "squawks", "squawk", "in the jungle", "nuts", ""),
    Animal("whale", "whales", "sings", "", "in the ocean", "tiny shrimps", "calf"),
    Animal("shark", "sharks", "", "", "in the ocean", "fish", ""),
    Animal("camel", "camels", "grunts", "", "in the desert", "dry plants", "calf"),
    Animal("penguin", "penguins", "", "", "on the ice", "fish", "chick"),
    Animal("polar bear", "polar bears", "growls", "", "on the ice", "seals", "cub"),
    Animal("rabbit", "rabbits", "", "", "in a burrow", "carrots", "bunny"),
    Animal("squirrel", "squirrels", "", "", "in a tree", "acorns", ""),
    Animal("spider", "spiders", "", "", "in a web", "flies", ""),
    Animal("ant", "ants", "", "", "in an anthill", "crumbs", ""),
    Animal("kangaroo", "kangaroos", "", "", "on the dry plains", "grass", "joey"),
    Animal("crab", "crabs", "", "", "on the seashore", "seaweed", ""),
    Animal("fox", "foxes", "yelps", "", "in a den", "hens", "cub"),
    Animal("bat", "bats", "", "", "in a cave", "moths", ""),
    Animal("crocodile", "crocodiles", "snaps", "", "in a river", "fish", ""),
    Animal("beaver", "beavers", "", "", "in a river", "bark", ""),
    Animal("mole", "moles", "", "", "under the ground", "worms", ""),
    Animal("hippo", "hippos", "", "", "in a river", "grass", "calf"),
    Animal("panda", "pandas", "", "", "in the bamboo forest", "bamboo", "cub"),
    Animal("bird", "birds", "sings", "", "in a nest", "seeds", "chick"),
    Animal("fish", "fish", "", "", "in the water", "little worms", ""),
)
CALLING_ANIMALS = tuple(animal for animal in ANIMALS if animal.sound)

FOOD_KINDS = (
    FoodKind("apple", "apples", "fruit"),
    FoodKind("banana", "bananas", "fruit"),
    FoodKind("pear", "pears", "fruit"),
    FoodKind("cherry", "cherries", "fruit"),
    FoodKind("orange", "oranges", "fruit"),
    FoodKind("grape", "grapes", "fruit"),
    FoodKind("carrot", "carrots", "vegetable"),
    FoodKind("potato", "potatoes", "vegetable"),
    FoodKind("cabbage", "cabbages", "vegetable"),
    FoodKind("onion", "onions", "vegetable"),
    FoodKind("pea", "peas", "vegetable"),
    FoodKind("leek", "leeks", "vegetable"),
)

FOOD_SOURCES = (
    FoodSource("milk", "cows"),
    FoodSource("eggs", "hens"),
    FoodSource("wool", "sheep"),
    FoodSource("honey", "bees"),
    FoodSource("apples", "apple trees"),
    FoodSource("flour", "wheat"),
    FoodSource("potatoes", "under the ground"),
    FoodSource("fish", "the sea"),
)

MEAL_DISHES = (
    MealDish("porridge", False, "breakfast"),
    MealDish("toast", False, "breakfast"),
    MealDish("cereal", False, "breakfast"),
    MealDish("pancakes", True, "breakfast"),
    MealDish("boiled eggs", True, "breakfast"),
    MealDish("sandwiches", True, "lunch"),
    MealDish("vegetable soup", False, "lunch"),
    MealDish("salad", False, "lunch"),
    MealDish("cheese rolls", True, "lunch"),
    MealDish("roast chicken", False, "dinner"),
    MealDish("pasta", False, "dinner"),
    MealDish("stew", False, "dinner"),
    MealDish("fish and rice", False, "dinner"),
    MealDish("meat pie", False, "dinner"),
    MealDish("ice cream", False, "pudding"),
    MealDish("apple pie", False, "pudding"),
    MealDish("cake", False, "pudding"),
)

MEAL_TIMES = {
    "breakfast": "in the morning",
    "lunch": "at midday",
    "dinner": "in the evening",
    "pudding": "after dinner",
}

TASTES = (
    Taste("lemons", True, "sour"),
    Taste("sugar", False, "sweet"),
    Taste("honey", False, "sweet"),
    Taste("salt", False, "salty"),
    Taste("cake", False, "sweet"),
    Taste("vinegar", False, "sour"),
    Taste("crisps", True, "salty"),
    Taste("chocolate", False, "sweet"),
    Taste("sea water", False, "salty"),
    Taste("strong coffee", False, "bitter"),
    Taste("limes", True, "sour"),
    Taste("chillies", True, "hot"),
    Taste("jam", False, "sweet"),
    Taste("pepper", False, "hot"),
)

WEATHER_CLOTHES = (
    WeatherClothes("it rains", ("a raincoat", "an umbrella")),
    WeatherClothes("it snows", ("a warm coat", "gloves")),
    WeatherClothes("it is sunny", ("a sun hat", "sunglasses")),
    WeatherClothes("it is cold", ("a scarf", "a woolly hat")),
    WeatherClothes("it is muddy", ("boots", "old trousers")),
    WeatherClothes("it is hot", ("a thin shirt", "sandals")),
)

WEATHER_FACTS = (
    WeatherFact("Rain falls from the clouds.", "Where does rain come from?", "Rain falls from the clouds."),
    WeatherFact("Snow is cold and white.", "What is snow like?", "Snow is cold and white."),
    WeatherFact("Ice is slippery.", "What is ice like to walk on?", "Ice is slippery."),
    WeatherFact("The wind makes kites fly.", "What makes kites fly?", "The wind makes kites fly."),
    WeatherFact("Thunder comes after lightning.", "What comes after lightning?", "Thunder comes after lightning."),
    WeatherFact(
        "A rainbow comes when the sun shines through the rain.",
        "When does a rainbow come?",
        "A rainbow comes when the sun shines through the rain.",
    ),
    WeatherFact("Fog makes it hard to see.", "What does fog do?", "Fog makes it hard to see."),
    WeatherFact(
        "Puddles are left on the ground after the rain.",
        "What is left on the ground after the rain?",
        "Puddles are left on the ground after the rain.",
    ),
    WeatherFact(
        "When water gets very cold, it turns into ice.",
        "What happens when water gets very cold?",
        "It turns into ice.",
    ),
    WeatherFact(
        "When ice gets warm, it melts into water.",
        "What happens when ice gets warm?",
        "It melts into water.",
    ),
    WeatherFact("The sun melts the snow.", "What melts the snow?", "The sun melts the snow."),
    WeatherFact(
        "The sun gives us light and heat.",
        "What gives us light and heat?",
        "The sun gives us light and heat.",
    ),
    WeatherFact(
        "Dark clouds mean that rain is coming.",
        "What do dark clouds mean?",
        "Dark clouds mean that rain is coming.",
    ),
    WeatherFact(
        "Strong wind blows the leaves off the trees.",
        "What blows the leaves off the trees?",
        "The strong wind blows the leaves off the trees.",
    ),
)

SEASON_FACTS = (
    SeasonFact("winter", "cold", "snow falls"),
    SeasonFact("spring", "mild", "flowers begin to grow"),
    SeasonFact("summer", "hot", "the days are long"),
    SeasonFact("autumn", "cool", "leaves fall from the trees"),
)
