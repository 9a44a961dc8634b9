"""Planted facts of the kinds that a fact guard is asked to keep: ids, numbers, names, dates and the like."""

from __future__ import annotations

from bench.compaction.bank import Topic, amount, count, day, identifier, path, person, reference, url
from bench.compaction.ruled_words import CJK, NEGATIONS, PREFERENCES, SUPERSEDED, TOOLS

IDS = (
    Topic(
        ("The booking reference for the ferry is {v}.", "For the ferry they gave me the reference {v}."),
        "What is the booking reference for the ferry?",
        ("ferry", "booking"),
        reference,
    ),
    Topic(
        ("My policy with the insurer runs under {v}.", "the insurance policy is {v}, in case they want it"),
        "Under which number does the insurance policy run?",
        ("policy", "insur"),
        reference,
    ),
    Topic(
        ("They opened case {v} about the broken elevator.", "The elevator thing has a case number, {v}."),
        "What is the case number about the elevator?",
        ("elevator", "case"),
        reference,
    ),
    Topic(
        ("The parcel with the lamp travels under {v}.", "Tracking for the lamp: {v}."),
        "What is the tracking number of the parcel with the lamp?",
        ("lamp", "parcel", "tracking"),
        reference,
    ),
    Topic(
        ("I have filed the return of the kettle; its number is {v}.", "The kettle's return is registered as {v}."),
        "Under which number is the return of the kettle filed?",
        ("kettle", "return"),
        reference,
        by="assistant",
    ),
    Topic(
        ("the sticker under the router says {v}", "Our router has the serial {v}."),
        "What is the serial of the router?",
        ("router", "serial", "sticker"),
        reference,
    ),
)
NUMBERS = (
    Topic(
        ("The deposit for the flat was {v} euros.", "we paid {v} euros as a deposit for the flat"),
        "How many euros was the deposit for the flat?",
        ("deposit", "flat"),
        amount,
    ),
    Topic(
        ("There are {v} chairs in the hall, I counted.", "The hall has {v} chairs."),
        "How many chairs are in the hall?",
        ("chair", "hall"),
        count,
    ),
    Topic(
        ("The well behind the barn is {v} cm deep.", "I measured the well: {v} cm."),
        "How many cm deep is the well?",
        ("well", "deep", "barn"),
        count,
    ),
    Topic(
        ("Dad's pension comes to {v} a month.", "my father gets {v} a month as pension"),
        "How much is the father's pension a month?",
        ("pension", "month"),
        amount,
    ),
    Topic(
        ("The quote of the roofer is {v} francs.", "The roofer wants {v} francs all in."),
        "How many francs does the roofer ask?",
        ("roofer", "quote"),
        amount,
    ),
    Topic(
        ("From our door to the cabin it is {v} km.", "The cabin is {v} km away from us."),
        "How many km is it to the cabin?",
        ("cabin", "km"),
        count,
    ),
)
NAMES = (
    Topic(
        ("Our plumber is called {v}.", "{v} is the one who does our plumbing."),
        "What is the plumber called?",
        ("plumb",),
        person,
    ),
    Topic(
        ("The vet who saw the dog was {v}.", "At the vet's we got {v} for the dog."),
        "Which vet saw the dog?",
        ("vet", "dog"),
        person,
    ),
    Topic(
        ("My choir is led by {v}.", "{v} conducts the choir I sing in."),
        "Who leads the choir?",
        ("choir", "conduct"),
        person,
    ),
    Topic(
        ("The contact at the archive is {v}.", "At the archive you have to ask for {v}."),
        "Who is the contact at the archive?",
        ("archive",),
        person,
    ),
    Topic(
        ("We sold the boat to {v}.", "The boat went to {v} in the end."),
        "To whom was the boat sold?",
        ("boat",),
        person,
    ),
    Topic(
        ("Your appointment is with {v} of the tax office.", "At the tax office, {v} has taken your file."),
        "Who at the tax office has the file?",
        ("tax", "office"),
        person,
        by="assistant",
    ),
)
DATES = (
    Topic(("The lease ends on {v}.", "our lease runs until {v}"), "When does the lease end?", ("lease",), day),
    Topic(
        ("My passport is valid until {v}.", "The passport runs out on {v}."),
        "When does the passport run out?",
        ("passport",),
        day,
    ),
    Topic(("The wedding is on {v}.", "They marry on {v}."), "When is the wedding?", ("wedding", "marry"), day),
    Topic(
        ("The boiler was last serviced on {v}.", "last service of the boiler: {v}"),
        "When was the boiler last serviced?",
        ("boiler", "service"),
        day,
    ),
    Topic(
        ("The exam has been put on {v}.", "I sit the exam on {v}."),
        "On which day is the exam?",
        ("exam",),
        day,
    ),
)
PATHS = (
    Topic(
        ("The photos of the survey are in {v}.", "I saved the survey photos under {v}."),
        "Where are the photos of the survey?",
        ("survey", "photo"),
        path,
    ),
    Topic(("The backup goes to {v}.", "every night it writes the backup to {v}"), "Where does the backup go?",
          ("backup",), path),
    Topic(
        ("I put the minutes into {v}.", "The minutes are in {v}."),
        "Where are the minutes?",
        ("minutes",),
        path,
        by="assistant",
    ),
    Topic(
        ("The import fails on {v}.", "{v} is the file on which the import stops."),
        "On which file does the import fail?",
        ("import", "fail", "stop"),
        path,
    ),
)  # fmt: skip
URLS = (
    Topic(
        ("The form for the grant is at {v}.", "You find the grant form under {v}."),
        "Where is the form for the grant?",
        ("grant", "form"),
        url,
    ),
    Topic(
        ("Our wiki moved in with the others: {v}.", "the wiki is at {v}"),
        "What is the address of the wiki?",
        ("wiki",),
        url,
    ),
    Topic(
        ("The recording of the talk: {v}.", "You can watch the talk at {v}."),
        "Where is the recording of the talk?",
        ("talk", "recording"),
        url,
        by="assistant",
    ),
)
IDENTIFIERS = (
    Topic(
        ("The function that loses rows is {v}.", "It is {v} that drops rows."),
        "Which function loses rows?",
        ("rows", "function"),
        identifier,
    ),
    Topic(
        ("We raised {v} before the release.", "before the release somebody raised {v}"),
        "Which setting was raised before the release?",
        ("release", "raised"),
        identifier,
    ),
    Topic(
        ("The flaky test is the one of {v}.", "Only the tests of {v} are flaky."),
        "Whose tests are flaky?",
        ("flaky", "test"),
        identifier,
    ),
)
QUOTES = (
    Topic(
        ('The sign at the gate says "{v}".', 'On the gate it reads "{v}".'),
        "What does the sign at the gate say?",
        ("gate", "sign"),
        (
            "mind the second step",
            "no entry after dusk",
            "ring twice and wait",
            "beware of the geese",
            "push, then lift",
        ),
    ),
    Topic(
        ('Her note on the fridge was "{v}".', 'On the fridge she left "{v}".'),
        "What did the note on the fridge say?",
        ("fridge", "note"),
        ("soup is for sunday", "feed the fish first", "back before the rain", "do not wake him", "ask next door"),
    ),
    Topic(
        ('The error it shows is "{v}".', 'It only prints "{v}" and stops.'),
        "Which error does it show?",
        ("error", "print", "shows"),
        ("lease table is stale", "frame count mismatch", "no such tenant key", "spool went away", "bad parity in slot"),
    ),
    Topic(
        ('The motto of the club is "{v}".', 'Our club goes by "{v}".'),
        "What is the motto of the club?",
        ("motto", "club"),
        ("slow hands, warm hearts", "first the rope", "one more mile", "nobody rows alone", "salt and patience"),
    ),
)

RULED: dict[str, tuple[Topic, ...]] = {
    "id": IDS,
    "number": NUMBERS,
    "name": NAMES,
    "date": DATES,
    "preference": PREFERENCES,
    "superseded": SUPERSEDED,
    "negation": NEGATIONS,
    "path": PATHS,
    "url": URLS,
    "identifier": IDENTIFIERS,
    "quoted": QUOTES,
    "cjk": CJK,
    "tool_result": TOOLS,
}
