"""Planted facts in plain words: nothing in them stands out by its form. No digit, no name, no mark, no quote.

Who is what to whom, why something was decided, what came before what, what is where, how somebody feels and what that
allows.
"""

from __future__ import annotations

from bench.compaction.bank import Topic

RELATIONS = (
    Topic(
        ("the woman who bakes our bread is my {v}.", "our bread comes from my {v}, she bakes it."),
        "Who bakes the bread?",
        ("bread", "bake"),
        ("neighbour's aunt", "boss's wife", "cousin's teacher", "landlord's mother", "dentist's sister"),
    ),
    Topic(
        ("the man who fixes our roof is my {v}.", "my {v} fixes our roof when it leaks."),
        "Who fixes the roof?",
        ("roof",),
        ("wife's uncle", "old coach", "brother's tenant", "former student", "daughter's godfather"),
    ),
    Topic(
        ("i share the allotment with my {v}.", "the allotment belongs to me and my {v}."),
        "With whom is the allotment shared?",
        ("allotment",),
        ("first husband", "former neighbour", "running partner", "youngest nephew", "old roommate"),
    ),
    Topic(
        ("the girl who waters the plants is the {v}.", "it is the {v} who waters our plants."),
        "Who waters the plants?",
        ("plants", "water"),
        ("caretaker's daughter", "baker's apprentice", "postman's niece", "butcher's granddaughter"),
    ),
    Topic(
        ("my chess opponent turned out to be the {v}.", "i lose at chess to the {v} every week."),
        "Who is the chess opponent?",
        ("chess",),
        ("organist's brother", "judge's widow", "florist's son", "principal's father", "tailor's cousin"),
    ),
)
CAUSES = (
    Topic(
        ("we took the smaller van because {v}.", "the reason for the smaller van is that {v}."),
        "Why was the smaller van taken?",
        ("van",),
        (
            "the lane is too narrow",
            "the big one needs another licence",
            "its heater is broken",
            "the ferry charges by length",
        ),
    ),
    Topic(
        ("i quit the evening course because {v}.", "i gave up the evening course, {v}."),
        "Why did the user quit the evening course?",
        ("course",),
        (
            "the teacher mumbled",
            "the last bus leaves early",
            "my knees hurt on the stairs",
            "nobody did the homework",
        ),
    ),
    Topic(
        ("we put the party off since {v}.", "the party had to wait, because {v}."),
        "Why was the party put off?",
        ("party",),
        (
            "the kitchen was flooded",
            "half the guests were ill",
            "the musicians went on strike",
            "my mother broke her wrist",
        ),
    ),
    Topic(
        ("she sold the piano because {v}.", "the piano was sold as {v}."),
        "Why was the piano sold?",
        ("piano",),
        (
            "the floor was sagging",
            "the upstairs family complained",
            "nobody could tune it anymore",
            "the movers refused the stairs",
        ),
    ),
    Topic(
        ("we went with the local printer because {v}.", "what decided for the local printer was that {v}."),
        "Why was the local printer chosen?",
        ("printer",),
        (
            "they proofread for free",
            "they deliver by bicycle",
            "they own the old typeface",
            "they forgave our late files",
        ),
    ),
)
ORDERS = (
    Topic(
        ("we painted the hallway {v}.", "the hallway was painted {v}."),
        "When was the hallway painted?",
        ("hallway", "paint"),
        (
            "before the floor went in",
            "after the doors were hung",
            "before the wiring was checked",
            "after the tenants left",
        ),
    ),
    Topic(
        ("i learned to swim {v}.", "swimming came to me {v}."),
        "When did the user learn to swim?",
        ("swim",),
        (
            "after i could already sail",
            "before i started school",
            "only after the army",
            "after my children did",
        ),
    ),
    Topic(
        ("the complaint went out {v}.", "we sent the complaint {v}."),
        "When was the complaint sent?",
        ("complaint",),
        (
            "before the invoice came",
            "after the second visit",
            "before anybody had called",
            "after the lawyer had read it",
        ),
    ),
    Topic(
        ("they tested the pump {v}.", "the pump was tested {v}."),
        "When was the pump tested?",
        ("pump",),
        (
            "after the pipes were sealed",
            "before the tank was filled",
            "before the valves arrived",
            "after the night shift ended",
        ),
    ),
    Topic(
        ("we adopted the cat {v}.", "the cat came to us {v}."),
        "When was the cat adopted?",
        ("cat",),
        (
            "before we moved here",
            "after the old dog died",
            "before the twins were born",
            "after the fence was built",
        ),
    ),
)
PLAIN = (
    Topic(
        ("the spare key hangs {v}.", "you find our spare key {v}."),
        "Where is the spare key?",
        ("key",),
        ("behind the boiler", "inside the birdhouse", "under the blue pot", "in the piano stool", "above the meter"),
    ),
    Topic(
        ("i write my drafts {v}.", "drafts i always write {v}."),
        "How does the user write drafts?",
        ("draft",),
        (
            "in green pencil",
            "on brown paper",
            "standing at the window",
            "in the margins of newspapers",
            "with my left hand",
        ),
    ),
    Topic(
        ("the old van leaks {v}.", "when it rains the old van leaks {v}."),
        "Where does the old van leak?",
        ("van", "leak"),
        ("by the rear lamp", "through the sunroof", "around the pedals", "over the driver seat", "beside the battery"),
    ),
    Topic(
        ("my neighbour breeds {v}.", "next door they breed {v}."),
        "What does the neighbour breed?",
        ("neighbour", "breed", "next door"),
        ("carrier pigeons", "stick insects", "angora rabbits", "dwarf goats", "freshwater crabs"),
    ),
    Topic(
        ("we store the apples {v}.", "the apples are kept {v}."),
        "Where are the apples stored?",
        ("apple",),
        ("in the bathtub", "under the staircase", "in wine crates", "behind the loom", "on the attic shelves"),
    ),
    Topic(
        ("the workshop smells of {v} since the repair.", "since the repair everything in the workshop smells of {v}."),
        "What does the workshop smell of?",
        ("workshop", "smell"),
        ("burnt rubber", "wet wool", "pine tar", "sour milk", "fresh varnish"),
    ),
)
CONSTRAINTS = (
    Topic(
        ("please keep calls short, {v}.", "calls have to be short because {v}."),
        "Why must calls be short?",
        ("call",),
        ("i tire quickly", "my ears ring", "the line is shared", "the baby wakes easily", "i pay by the minute"),
    ),
    Topic(
        ("i feel uneasy about {v}.", "to be honest {v} makes me uneasy."),
        "What makes the user uneasy?",
        ("uneasy",),
        ("driving at night", "empty stairwells", "frozen lakes", "talking to doctors", "sleeping in tents"),
    ),
    Topic(
        ("we can only meet {v}.", "meeting works for us only {v}."),
        "When can they meet?",
        ("meet",),
        ("while the baby naps", "once the shop closes", "between two tides", "when the nurse is there"),
    ),
    Topic(
        ("whatever you suggest, it has to work {v}.", "any idea must work {v}."),
        "Under which condition must a suggestion work?",
        ("work", "suggest", "idea"),
        ("without an oven", "in a wheelchair", "with one hand free", "in complete silence", "without running water"),
    ),
    Topic(
        ("lately i am rather {v} about the move.", "about the move i feel {v} these days."),
        "How does the user feel about the move?",
        ("move",),
        ("quietly hopeful", "strangely bored", "deeply torn", "almost relieved", "plainly furious"),
    ),
)

UNRULED: dict[str, tuple[Topic, ...]] = {
    "relation": RELATIONS,
    "cause": CAUSES,
    "order": ORDERS,
    "plain": PLAIN,
    "constraint": CONSTRAINTS,
}
