"""Names and numbers that puzzles are made of, drawn without repetition and never found in the haystack."""

import random
import string
from collections.abc import Callable

# plain things, one word each; none is part of another
_NOUNS = """
anchor antelope apricot armchair avocado badger bagpipe balloon bamboo basil beaver biscuit blanket blender
bobsled bonnet bracelet broccoli bucket buffalo cabbage camel candle carpet carrot cashew cello chimney cinnamon
clarinet cobbler coconut compass crayon cricket cucumber curtain cushion daffodil dolphin donkey doorbell dragonfly
drawer dumpling eggplant falcon feather ferret fiddle flamingo flute fountain gazelle geranium ginger giraffe
goblet gondola gorilla grapefruit hamster harmonica hazelnut hedgehog helmet hyacinth iguana jaguar jigsaw kayak
kettle kitten ladder lantern lavender lemonade leopard lettuce lizard lobster mango marble meadow mitten mosaic
muffin mushroom napkin necklace nutmeg octopus orchid ostrich otter paddle pancake parrot parsley peacock pebble
pelican pepper piano pickle pigeon pillow pineapple plum pony pretzel pumpkin pyramid quilt raccoon radish raisin
raspberry rocket saddle salmon sandal saucer scarf scooter sofa sparrow spinach sponge squirrel stapler teapot
thimble toaster tortoise trumpet tulip turnip umbrella unicycle vanilla velvet violin waffle walnut walrus
whistle yogurt zebra zucchini
"""
NOUNS = tuple(_NOUNS.split())
DIGITS = 7  # of a hidden number, as in RULER


def drawn(count: int, draw: Callable[[], str], avoid: str) -> list[str]:
    """Return `count` different strings of `draw`, none of them in `avoid`.

    Raises: ValueError when a hundred draws in a row gave nothing new.
    """
    found: dict[str, None] = {}
    tries = 0
    while len(found) < count:
        word = draw()
        tries += 1
        if word not in found and word not in avoid:
            found[word] = None
            tries = 0
        elif tries >= 100:
            raise ValueError("haystack holds nearly every name that could be hidden in it")
    return list(found)


def nouns(rng: random.Random, count: int, avoid: str) -> list[str]:
    """Return `count` different nouns; `avoid` is the text in lower case that they must not occur in."""
    return drawn(count, lambda: rng.choice(NOUNS), avoid)


def numbers(rng: random.Random, count: int, avoid: str) -> list[str]:
    """Return `count` different numbers of DIGITS digits."""
    return drawn(count, lambda: str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)), avoid)


def capitals(rng: random.Random, count: int, avoid: str) -> list[str]:
    """Return `count` different names of four capital letters, consonants only, so that none is a word."""
    letters = "BCDFGHJKLMNPQRSTVWXZ"
    return drawn(count, lambda: "".join(rng.choices(letters, k=4)), avoid)


def coded(rng: random.Random, count: int) -> list[str]:
    """Return `count` different made-up words of six small letters."""
    return drawn(count, lambda: "".join(rng.choices(string.ascii_lowercase, k=6)), "")
