"""The corpus's vocabulary; each word is one or two tokens."""

from __future__ import annotations

# ruff: noqa: SIM905 - a list of words reads best as text

NAMES = (
    "Ava Ben Cleo Dan Ella Finn Grace Hugo Iris Jack Kira Leo Mia Noah Olga Paul Quinn Rosa Sam Tara Uma Vera Will Zoe"
).split()
ITEMS = "apples books coins pens shells stamps cards marbles stones plums buttons tickets cups eggs keys lamps".split()
COLORS = "red green blue black white yellow purple orange".split()
CITIES = "Oslo Paris Rome Lima Cairo Tokyo Delhi Sydney Boston Quito Madrid Vienna Dublin Athens Prague Seoul".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
FOODS = "soup bread cheese rice noodles fish pies honey cakes tea olives beans".split()
SIGHTS = "bridge harbor castle market gardens museum tower park".split()
MOODS = "quiet lively sunny windy foggy friendly busy calm".split()
TOPICS = "sleep cooking running painting music gardening chess travel reading saving swimming writing".split()
TIPS = (
    "start small and build up slowly",
    "keep a simple plan on paper",
    "set a fixed time each day",
    "ask a friend to join you",
    "take short breaks",
    "write down what worked",
    "use good tools",
    "learn one new thing each week",
    "celebrate small wins",
    "begin with the part you enjoy most",
    "review your goals every month",
    "rest well before you begin",
)
ANIMALS = "fox owl cat bear crow hare wolf mouse frog goose".split()
PLACES = "forest river village mountain meadow harbor garden valley".split()
OBJECTS = "lantern map bell key coin book mirror kite".split()
