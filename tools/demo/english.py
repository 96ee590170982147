"""The little English grammar the templates need: capitals, articles, verb forms, possessives."""

from __future__ import annotations

REFLEXIVES = {"my": "myself", "our": "ourselves", "his": "himself", "her": "herself"}
IRREGULAR_PASTS = {"sings": "sang", "snaps": "snapped"}


def capitalized(text: str) -> str:
    """The text with a capital first letter; unlike str.capitalize it leaves the rest alone."""
    return text[0].upper() + text[1:]


def decapitalized(text: str) -> str:
    """The text with a small first letter."""
    return text[0].lower() + text[1:]


def with_article(noun: str) -> str:
    """The noun after "a" or "an", unless it already has an article."""
    if noun.startswith(("the ", "a ", "an ")):
        return noun
    sounds_like_vowel = noun[0].lower() in "aeiou" and not noun.startswith(("uni", "one", "eu"))
    return f"an {noun}" if sounds_like_vowel else f"a {noun}"


def without_article(noun: str) -> str:
    """The noun without its article, if it has one."""
    for article in ("a ", "an ", "the "):
        if noun.startswith(article):
            return noun.removeprefix(article)
    return noun


def base_form(verb: str) -> str:
    """The base form of a verb in the third person: "moos" gives "moo", "hisses" gives "hiss"."""
    return verb[:-2] if verb.endswith(("sses", "zzes")) else verb[:-1]


def past_tense(verb: str) -> str:
    """The past of a verb given in the third person: "moos" gives "mooed"."""
    if verb in IRREGULAR_PASTS:
        return IRREGULAR_PASTS[verb]
    base = base_form(verb)
    return base + ("d" if base.endswith("e") else "ed")


def with_possessive(phrase: str, possessive: str) -> str:
    """A phrase about "your" and "yourself", said of "my", "our", "his" or "her" instead."""
    return phrase.replace("yourself", REFLEXIVES[possessive]).replace("your", possessive)
