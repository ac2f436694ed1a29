"""Texts that may be cron expressions: right ones, nearly right ones, and noise."""

import random

TOKENS = (
    *"0123456789",
    "*",
    "*/",
    "-",
    ",",
    "/",
    "#",
    "L",
    "LW",
    "W",
    "?",
    "@",
    "MON",
    "sun",
    "JAN",
    "dec",
    "+",
    ".",
    "  ",
)
NOISE = (
    *TOKENS,
    "\0",
    "\n",
    "\t",
    "é",
    "²",
    "٣",
    "\ud800",
    "99999999999999999999",
    "-1",
    "*" * 50,
    "1," * 80,
    "@daily",
)
SPANS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def draw(chosen: random.Random) -> str:
    kind = chosen.random()
    if kind < 0.1:
        return "".join(chosen.choices(NOISE, k=chosen.randrange(40)))
    if kind < 0.3:
        return " ".join("".join(chosen.choices(TOKENS, k=chosen.randint(1, 4))) for _ in range(chosen.randint(4, 7)))
    text = " ".join(_field(chosen, *span) for span in SPANS)
    if kind < 0.7:
        return text
    at, gone = chosen.randrange(len(text)), chosen.randint(0, 2)  # a slip of the pen
    return f"{text[:at]}{chosen.choice(NOISE)}{text[at + gone :]}"


def _field(chosen: random.Random, least: int, most: int) -> str:
    terms = []
    for _ in range(chosen.choice((1, 1, 1, 2, 5))):
        first, second = sorted((chosen.randint(least, most), chosen.randint(least, most)))
        step = chosen.randint(1, most)
        term = chosen.choice(("*", "*", f"*/{step}", f"{first}", f"{first}-{second}", f"{first}-{second}/{step}"))
        if most == 31:
            term = chosen.choice((term, term, "L", "LW"))
        elif most == 7:
            term = chosen.choice((term, term, f"{first}L", f"{first}#{chosen.randint(1, 5)}", "TUE"))
        terms.append(term)
    return ",".join(terms)
