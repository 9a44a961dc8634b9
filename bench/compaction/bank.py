"""What a planted fact is made of: how it may be said, what is asked about it, where its value comes from.

Written from the list of kinds alone: nothing here knows how a summary is made or what a guard looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

Maker = Callable[[Random], str]


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing that can be told once in a conversation.

    `say`: ways to tell it, with `{v}` for the value (and `{old}` where a value is superseded; then `first` are the ways
    to tell the old one). `keys`: words of the subject, one of which stands beside the value where the two are still
    connected. `values`: where values come from: a maker, or the choices there are. `by`: who says it.
    """

    say: tuple[str, ...]
    ask: str
    keys: tuple[str, ...]
    values: Maker | tuple[str, ...]
    by: str = "user"
    first: tuple[str, ...] = ()
    language: str = "en"

    def value(self, random: Random) -> str:
        return self.values(random) if callable(self.values) else random.choice(self.values)


FIRST_NAMES = (
    *("Tomasz", "Ingrid", "Farouk", "Odile", "Henrik", "Marisol", "Aino", "Dmitri", "Yusuf", "Brigid", "Leonor"),
    *("Kwame", "Saskia", "Pavel", "Noor", "Emeka", "Ruta", "Gianni", "Solveig", "Arjun", "Mirela", "Callum", "Zsofia"),
)
LAST_NAMES = (
    *("Okonkwo", "Lindqvist", "Marchetti", "Bielak", "Haddad", "Ferreira", "Novak", "Ostrander", "Kaya", "Delacroix"),
    *("Virtanen", "Moreau", "Petrov", "Aguirre", "Bakker", "Szabo", "Tanaka", "Whitlock", "Eriksen", "Castellano"),
)
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
STEMS = ("tariff", "quota", "basin", "relay", "ferry", "orchard", "beacon", "cellar", "harvest", "lantern", "meadow")
ENDS = ("rows", "index", "batch", "window", "cache", "report", "table", "queue", "offset", "digest")


def reference(random: Random) -> str:
    """An id as shops, carriers and offices give them."""
    two = "".join(random.choices(LETTERS, k=2))
    three = "".join(random.choices(LETTERS, k=3))
    shapes = (
        f"{two}{random.randint(1, 9)}-{random.randint(1000, 9999)}-{random.choice(LETTERS)}",
        f"{three}-{random.randint(10000, 99999)}",
        f"{random.randint(10_000_000, 99_999_999)}",
        f"{two}/{random.randint(2023, 2027)}/{random.randint(1000, 9999)}",
        f"{random.getrandbits(32):08x}",
        f"{three}{random.randint(100, 999)}{random.choice(LETTERS)}{random.randint(10, 99)}",
    )
    return random.choice(shapes)


def amount(random: Random) -> str:
    whole = random.randint(1_101, 9_899)
    return random.choice((f"{whole:,}", str(whole), f"{random.randint(111, 989)}.{random.randint(11, 98)}"))


def count(random: Random) -> str:
    return str(random.randint(103, 987))


def person(random: Random) -> str:
    return f"{random.choice(FIRST_NAMES)} {random.choice(LAST_NAMES)}"


def day(random: Random) -> str:
    month, number, year = random.randrange(12), random.randint(1, 28), random.randint(2026, 2029)
    return random.choice(
        (f"{number} {MONTHS[month]} {year}", f"{year}-{month + 1:02}-{number:02}", f"{MONTHS[month]} {number}, {year}")
    )


def clock(random: Random) -> str:
    return f"{random.randint(6, 21)}:{random.choice(('05', '10', '20', '35', '40', '50', '55'))}"


def path(random: Random) -> str:
    a, b, end = random.choice(STEMS), random.choice(STEMS), random.choice(ENDS)
    shapes = (
        f"/srv/{a}/{b}_{end}.csv",
        f"~/projects/{a}/{b}-{end}.md",
        f"src/{a}/{b}_{end}.py",
        f"C:\\Data\\{a.title()}\\{b}_{end}.xlsx",
        f"/var/lib/{a}-{end}/{b}.db",
    )
    return random.choice(shapes)


def url(random: Random) -> str:
    a, b = random.choice(STEMS), random.choice(STEMS)
    host = random.choice((f"{a}.example.org", f"docs.{a}.example.com", f"{a}-{b}.example.net"))
    return f"https://{host}/{random.choice(ENDS)}/{random.randint(100, 9999)}"


def identifier(random: Random) -> str:
    a, b, end = random.choice(STEMS), random.choice(STEMS), random.choice(ENDS)
    shapes = (f"merge_{a}_{end}", f"{a.upper()}_{end.upper()}_MAX", f"{a.title()}{end.title()}Reader", f"{a}.{b}_{end}")
    return random.choice(shapes)
