"""Words, scripts and languages of a text, by tables only. Knows no tokenizer and no model.

A word here is what makes two clauses say the same: a run of letters in scripts that put spaces between words, a pair
of characters in Chinese, Japanese and Korean. Function words (articles, pronouns, auxiliaries) say nothing alone;
chat words ("happy to help", "suggest") say little.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple


def joined(table: str, between: str = "") -> str:
    """A table written over several lines as one line; lines are parted where nothing or `between` belongs."""
    return between.join(line.strip() for line in table.strip().splitlines())


def _table(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTION_WORDS: dict[str, frozenset[str]] = {
    "en": _table(
        """a an the and or but if so as at by for from in into of on onto off out over to up with without about
        than then is am are was were be been being do does did done have has had having will would shall should
        can could may might must i me my mine we us our you your he him his she her it its they them their this
        that these those there here who whom whose which what when where why how not no nor too very just only
        also any some all both each such own same because while until though although whether i'm i've i'd i'll
        it's that's you're we're don't doesn't didn't isn't aren't wasn't can't won't couldn't wouldn't let's
        there's he's she's they're we've you've"""
    ),
    "de": _table(
        """der die das den dem des ein eine einen einem einer eines und oder aber wenn als auch auf aus bei mit
        nach von vor zu zum zur im in ins an am um für über unter durch gegen ohne ist bin bist sind war waren
        sein gewesen habe hast hat haben hatte hatten wird werden wurde würde kann können muss müssen soll
        sollen will wollen darf ich mich mir mein meine meinen meinem meiner du dich dir dein deine er ihn ihm
        sie es wir uns unser unsere ihr euch ihre ihren man sich nicht kein keine keinen dass weil ob wie was
        wer wo wann warum welche noch nur schon sehr dann dort hier da so doch mal bitte diese dieser dieses"""
    ),
    "fr": _table(
        """le la les l un une des du de d au aux et ou mais si que qu qui quoi dont où quand comment pourquoi je j
        me m moi mon ma mes tu te toi ton ta tes il elle on nous notre nos vous votre vos ils elles leur leurs
        se s ce cet cette ces c ça en y dans sur sous avec sans pour par chez vers est suis es sommes êtes sont
        était étaient être été ai as a avons avez ont avait avoir sera serait fait faire peut peux pouvez veux
        doit ne n pas plus aussi très bien comme donc car alors"""
    ),
    "es": _table(
        """el la los las un una unos unas de del al a en con sin por para sobre entre y e o u pero si que qué quien
        quién cual cuál cuando cuándo donde dónde como cómo porque yo me mi mis mí tú te tu tus él ella ello nos
        nosotros nuestro nuestra ellos ellas su sus se lo le les este esta esto estos estas ese esa eso es soy
        eres somos son era eran ser sido estoy está están estar he has ha hemos han había hay puede puedo quiero
        no ni ya muy más también"""
    ),
    "it": _table(
        """il lo la i gli le un uno una di del della dei delle dello a al alla ai alle da dal dalla in nel nella
        con su sul sulla per tra fra e ed o ma se che chi cui cosa quando dove come perché io mi mio mia miei tu
        ti tuo tua lui lei noi ci nostro voi vi loro si è sono sei siamo era essere stato ho hai ha abbiamo
        hanno aveva non più anche molto questo questa questi quello quella"""
    ),
    "pt": _table(
        """o a os as um uma uns umas de do da dos das em no na nos nas com sem por pelo pela para sobre e ou mas se
        que quem qual quando onde como porque eu me mim meu minha tu te você teu seu sua ele ela nós nos nosso
        eles elas lhe este esta isto esse essa isso é sou és somos são era ser sido estou está estão estar tenho
        tem temos têm tinha há não já muito mais também"""
    ),
    "nl": _table(
        """de het een en of maar als dan dat die dit deze wie wat waar wanneer hoe waarom ik me mij mijn jij je
        jouw hij hem zijn zij ze haar wij we ons onze jullie u uw hun is ben bent was waren geweest heb hebt
        heeft hebben had word wordt worden kan kunnen moet moeten zal zullen wil niet geen ook nog al te van
        voor met op aan in uit bij naar om door over onder zonder er hier daar zo"""
    ),
}
ALL_FUNCTION_WORDS = frozenset().union(*FUNCTION_WORDS.values())

CHAT_WORDS = _table(
    """able absolutely additional additionally advice also always answer ask asking assist available based
        basically best better certainly clear come common consider could course create definitely different easy
        ensure especially etc even every example explain feel few find follow following free further general
        generally get getting give glad go going good got great guess happy help helpful helps hello hey hi hope
        however idea ideas important include includes including information interested interesting just keep
        kind know let like list little look looking lot lots make making many maybe mean mention mentioned might
        mind more most much need needs nice now offer often okay one option options other others overall
        particular perfect perhaps please possible possibly potential probably provide question questions quick
        quite really recommend regarding related right say see several share show simple simply some something
        sometimes soon specific start stuff suggest suggestion suggestions sure take tell thank thanks thing
        things think thought tip tips today together topic try trying two understand use used useful using
        usually various want wanted way ways well wonderful wondering work would yeah yes yet bitte danke gerne
        natürlich vielleicht eigentlich übrigens hallo genau klar hilfe helfen frage fragen möchte gut machen
        gibt geben einfach wirklich etwas mehr immer bonjour merci bien sûr peut-être voici voilà aider aide
        question plaît svp salut faire faut avoir chose choses hola gracias claro quizás ayuda ayudar pregunta
        favor bueno bien hacer puede cosas"""
)

_CJK_STOP = frozenset(
    "的了是在我你他她它们有和与就不也都吗呢吧啊哦嗯这那个些么什怎很请把被对会能可以要到去来说上下一及或但而"
    "はがをにでとものへやかねよるてしたれらなどこそあうくきですまさいっりけせ은는이가을를에의도로와과"
)

_WORD = re.compile(
    r"[0-9A-Za-z\u00C0-\u024F\u0370-\u03FF\u0400-\u052F\u0590-\u05FF\u0600-\u06FF\u0900-\u0DFF\u0E00-\u0E7F]"
    r"(?:[0-9A-Za-z\u00C0-\u024F\u0300-\u036F\u0370-\u03FF\u0400-\u052F\u0590-\u06FF\u0900-\u0DFF\u0E00-\u0E7F_'’.\-]*"
    r"[0-9A-Za-z\u00C0-\u024F\u0300-\u036F\u0370-\u03FF\u0400-\u052F\u0590-\u06FF\u0900-\u0DFF\u0E00-\u0E7F])?"
    r"|[\u3040-\u30FF\u3400-\u9FFF\uAC00-\uD7AF\uF900-\uFAFF]+"
)
_ASCII_WORD = re.compile(r"[0-9a-z](?:[0-9a-z_'.\-]*[0-9a-z])?")
_ELISION = re.compile(r"^(?:l|d|j|qu|n|m|s|c|t)['’](?=\w)")
_CJK = re.compile(r"[\u3040-\u30FF\u3400-\u9FFF\uAC00-\uD7AF\uF900-\uFAFF]")

_SCRIPTS: tuple[tuple[str, int, int], ...] = (  # Unicode blocks, first to last code point
    ("latin", 0x41, 0x24F),
    ("latin", 0x1E00, 0x1EFF),
    ("greek", 0x370, 0x3FF),
    ("cyrillic", 0x400, 0x52F),
    ("hebrew", 0x590, 0x5FF),
    ("arabic", 0x600, 0x77F),
    ("devanagari", 0x900, 0x97F),
    ("bengali", 0x980, 0x9FF),
    ("tamil", 0xB80, 0xBFF),
    ("thai", 0xE00, 0xE7F),
    ("georgian", 0x10A0, 0x10FF),
    ("hangul", 0x1100, 0x11FF),
    ("kana", 0x3040, 0x30FF),
    ("han", 0x3400, 0x9FFF),
    ("hangul", 0xAC00, 0xD7AF),
    ("han", 0xF900, 0xFAFF),
    ("han", 0x20000, 0x2FA1F),
)
_NUMERALS = """two zwei deux dos, three drei trois tres, four vier quatre cuatro, five fünf cinq cinco, six sechs seis,
    seven sieben sept siete, eight acht huit ocho, nine neun neuf nueve, ten zehn dix diez, eleven elf onze once,
    twelve zwölf douze doce"""
NUMBER_WORDS: dict[str, str] = {
    word: str(number) for number, names in enumerate(_NUMERALS.split(","), start=2) for word in names.split()
}
_GROUPED = re.compile(r"(?<![\d.,])(\d{1,3})((?:[,.'’ \u00a0\u202f]\d{3})+)(?!\d)")
_SPACE = re.compile(r"\s+")
PIECE_CHARS = 2000  # of a text that is looked through at once


def windows(text: str) -> Iterator[tuple[int, str]]:
    """The text in pieces of at most PIECE_CHARS, cut at spaces where there are any, each with its offset.

    Patterns may take time in the square of what they are given."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind(" ", start + PIECE_CHARS // 2, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
        yield start, text[start:end]
        start = end
    yield start, text[start:]


def is_cjk(text: str) -> bool:
    """Whether the text holds at least one Chinese, Japanese or Korean character."""
    return _CJK.search(text) is not None


def words(text: str) -> list[str]:
    """Case-folded words in order; a CJK run gives its overlapping pairs (a single character gives itself)."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    found: list[str] = []
    for match in _WORD.finditer(text):
        run = match.group().casefold()
        if _CJK.match(run):
            found.extend(run[i : i + 2] for i in range(max(1, len(run) - 1)))
        else:
            found.append(_ELISION.sub("", run.replace("’", "'")))
    return found


def content_words(text: str) -> list[str]:
    """The words that say something: no function words, no CJK pair of grammatical characters."""
    return [word for word in words(text) if not _is_function(word)]


def _is_function(word: str) -> bool:
    if _CJK.match(word):
        return all(char in _CJK_STOP for char in word)
    return word in ALL_FUNCTION_WORDS or (len(word) == 1 and not word.isdigit())


def is_grammatical(word: str) -> bool:
    """Whether a CJK pair holds a grammatical character: such a pair names no subject."""
    return _CJK.match(word) is not None and any(char in _CJK_STOP for char in word)


class Term(NamedTuple):
    """A content word of a text."""

    word: str
    stem: str
    chat: bool  # says little: "suggest", "happy"
    wide: bool  # a pair of Chinese, Japanese or Korean characters


class Vocabulary:
    """Reads texts into terms and remembers the words it has seen, since most come again."""

    def __init__(self) -> None:
        self._seen: dict[str, Term | None] = {}

    def terms(self, text: str) -> tuple[Term, ...]:
        found = []
        for word in words(text):
            if word in self._seen:
                term = self._seen[word]
            else:
                term = None if _is_function(word) else Term(word, stem(word), word in CHAT_WORDS, is_cjk(word))
                self._seen[word] = term
            if term is not None:
                found.append(term)
        return tuple(found)


def stem(word: str) -> str:
    """A crude common form, so that "meetings" meets "meeting" and "moved" meets "move". CJK words stay as they are."""
    if len(word) < 5 or not word.isascii() or not word.isalpha():
        return word
    for ending in ("ings", "ing", "ies", "ed", "es", "s", "e", "y"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def scripts(text: str) -> Counter[str]:
    """Letters by script. A Han, kana or Hangul character counts twice: it stands for more than one Latin letter."""
    counts: Counter[str] = Counter()
    for char in text:
        code = ord(char)
        if code < 0x80:
            if char.isalpha():
                counts["latin"] += 1
            continue
        for name, first, last in _SCRIPTS:
            if first <= code <= last and char.isalpha():
                counts[name] += 2 if name in ("han", "kana", "hangul") else 1
                break
    return counts


def languages(text: str) -> Counter[str]:
    """How many function words of each Latin-script language the text holds; words of several count in each."""
    counts: Counter[str] = Counter()
    for word in words(text):
        for language, table in FUNCTION_WORDS.items():
            if word in table:
                counts[language] += 1
    return counts


def language_of(text: str) -> str | None:
    """The language of a text as an ISO 639-1 code, or None where the tables cannot tell."""
    letters = scripts(text)
    if not letters:
        return None
    script, most = letters.most_common(1)[0]
    if letters["kana"] * 8 > sum(letters.values()) and script in ("han", "kana"):
        return "ja"
    if script != "latin":
        return {"han": "zh", "kana": "ja", "hangul": "ko", "cyrillic": "ru", "greek": "el", "arabic": "ar"}.get(script)
    found = languages(text).most_common(2)
    if most < 8 or not found or found[0][1] < 2:
        return None
    if len(found) > 1 and found[0][1] == found[1][1]:
        return None
    return found[0][0]


_HAN_DIGITS = {char: number for number, char in enumerate("〇一二三四五六七八九")} | {"零": 0, "两": 2}
_HAN_UNITS = {"十": 10, "百": 100, "千": 1000}
_HAN_MYRIADS = {"万": 10**4, "億": 10**8, "亿": 10**8}
_HAN_NUMBER = re.compile(  # bounded, and not from within digits: else a run of them is looked through from each to each
    r"(?<!\d)(?:\d{1,20}(?:\.\d{1,20})?|[〇零一二两三四五六七八九])"
    r"(?:[〇零一二两三四五六七八九\d]{0,20}[十百千万億亿]){1,20}[一二三四五六七八九]?"
)


LONGEST_NUMBER = 32  # characters of a number with Han numerals in it


def _arabic(number: str) -> str:
    """A number in Han numerals, or digits with them ("3万2千"), in digits; as it is where it is no plain number."""
    if len(number) > LONGEST_NUMBER:  # no number of anybody's: a float would not hold it
        return number
    total, below, digits = 0.0, 0.0, ""
    for char in number:
        if char in _HAN_UNITS:
            below += float(digits or 1) * _HAN_UNITS[char]
            digits = ""
        elif char in _HAN_MYRIADS:
            total += (below + float(digits or 0)) * _HAN_MYRIADS[char]
            below, digits = 0.0, ""
        else:
            digits += str(_HAN_DIGITS.get(char, char))
    total += below + float(digits or 0)
    return str(int(total)) if total == int(total) and total < 10**15 else number


def normalise(text: str) -> str:
    """For comparing values: NFKC, case folded, spaces as one, digit groups joined ("1,000" is "1000"), small number
    words and Han numerals as digits, typographic quotes and dashes as plain ones."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = text.translate(_PLAIN)
    if _HAN_NUMBER.search(text):
        text = _HAN_NUMBER.sub(lambda match: _arabic(match[0]), text)
    text = _GROUPED.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), text)
    text = re.sub(r"[a-zäöüß]+", lambda match: NUMBER_WORDS.get(match[0], match[0]), text)
    return _SPACE.sub(" ", text).strip()


_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": "-", "‐": "-", "‑": "-", "\u00ad": None})
