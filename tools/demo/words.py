"""The words of the small world: names, numbers, the calendar, colours, opposites and plurals."""

from __future__ import annotations

GIRLS = (
    "Lily", "Anna", "Mia", "Sara", "Ella", "Rosa", "Nina", "Ivy", "Zoe", "Ruby", "Maya", "Clara", "Hana", "Tess",
    "Daisy", "Amira", "Lucy", "Jane", "Poppy", "Freya",
)
BOYS = (
    "Tom", "Ben", "Max", "Sam", "Leo", "Omar", "Jack", "Finn", "Noah", "Oscar", "Hugo", "Adam", "Kofi", "Luca",
    "Theo", "Ravi", "Peter", "Dan", "Milo", "Yusuf",
)
NAMES = GIRLS + BOYS

NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)
SEASONS = ("spring", "summer", "autumn", "winter")

COLOURS = ("red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black", "white", "grey")

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("tall", "short"), ("fast", "slow"), ("happy", "sad"), ("light", "dark"),
    ("open", "closed"), ("full", "empty"), ("wet", "dry"), ("old", "young"), ("hard", "soft"), ("loud", "quiet"),
    ("clean", "dirty"), ("rich", "poor"), ("strong", "weak"), ("thick", "thin"), ("wide", "narrow"),
    ("early", "late"), ("up", "down"), ("in", "out"), ("left", "right"), ("day", "night"), ("first", "last"),
    ("good", "bad"), ("near", "far"), ("high", "low"), ("heavy", "light"), ("sweet", "sour"), ("rough", "smooth"),
    ("true", "false"), ("easy", "difficult"), ("deep", "shallow"), ("brave", "afraid"), ("sharp", "blunt"),
    ("asleep", "awake"), ("inside", "outside"), ("above", "below"), ("before", "after"), ("start", "stop"),
    ("push", "pull"), ("give", "take"), ("laugh", "cry"), ("win", "lose"), ("buy", "sell"), ("remember", "forget"),
    ("love", "hate"), ("summer", "winter"), ("morning", "evening"), ("king", "queen"), ("brother", "sister"),
)

# (one, many)
PLURALS = (
    ("child", "children"), ("mouse", "mice"), ("foot", "feet"), ("tooth", "teeth"), ("goose", "geese"),
    ("man", "men"), ("woman", "women"), ("sheep", "sheep"), ("fish", "fish"), ("leaf", "leaves"),
    ("wolf", "wolves"), ("knife", "knives"), ("loaf", "loaves"), ("shelf", "shelves"), ("half", "halves"),
    ("calf", "calves"), ("baby", "babies"), ("puppy", "puppies"), ("berry", "berries"), ("story", "stories"),
    ("lady", "ladies"), ("city", "cities"), ("pony", "ponies"), ("fox", "foxes"), ("box", "boxes"),
    ("bus", "buses"), ("dish", "dishes"), ("brush", "brushes"), ("church", "churches"), ("peach", "peaches"),
    ("glass", "glasses"), ("dress", "dresses"), ("potato", "potatoes"), ("tomato", "tomatoes"), ("hero", "heroes"),
    ("cat", "cats"), ("dog", "dogs"), ("book", "books"), ("tree", "trees"), ("boy", "boys"), ("toy", "toys"),
    ("key", "keys"), ("day", "days"), ("person", "people"), ("ox", "oxen"), ("scarf", "scarves"),
    ("thief", "thieves"), ("house", "houses"), ("deer", "deer"), ("butterfly", "butterflies"), ("bench", "benches"),
    ("watch", "watches"),
)
