"""Planted facts that extraction was never tuned on: other subjects, said in longer and clumsier sentences.

Written after the first topics had been used to find out what extraction loses. Whoever works on extraction looks at the
others; these are only for holding it against.
"""

from __future__ import annotations

from bench.compaction.bank import Topic, amount, clock, day, identifier, path, person, reference, url

HELD_RULED: dict[str, tuple[Topic, ...]] = {
    "id": (
        Topic(
            ("If customs ask, and they usually do, the declaration was filed as {v} by my sister.",),
            "As what was the customs declaration filed?",
            ("customs", "declaration"),
            reference,
        ),
        Topic(
            ("Just so that you have it: {v} is what they engraved on the bicycle frame.",),
            "What is engraved on the bicycle frame?",
            ("bicycle", "frame"),
            reference,
        ),
        Topic(
            ("For your notes, the complaint at the airline was entered under {v} this morning.",),
            "Under what was the complaint at the airline entered?",
            ("airline", "complaint"),
            reference,
            by="assistant",
        ),
    ),
    "number": (
        Topic(
            ("In the end, after all the haggling, the tractor went for {v} and everybody was happy.",),
            "For how much did the tractor go?",
            ("tractor",),
            amount,
        ),
        Topic(
            ("My grandmother, believe it or not, owned {v} acres before the war.",),
            "How many acres did the grandmother own?",
            ("acres", "grandmother"),
            amount,
        ),
    ),
    "name": (
        Topic(
            ("It turned out that {v} had been paying for the lighthouse all along.",),
            "Who had been paying for the lighthouse?",
            ("lighthouse",),
            person,
        ),
        Topic(
            ("Whenever I am away you should send such things to {v}, who has my stamp.",),
            "Who has the user's stamp?",
            ("stamp", "send"),
            person,
        ),
    ),
    "date": (
        Topic(
            ("They have finally agreed to switch the old mainframe off, and it will be on {v}.",),
            "When will the old mainframe be switched off?",
            ("mainframe",),
            day,
        ),
        Topic(
            ("Our silver wedding falls on {v}, a little awkwardly.",), "When is the silver wedding?", ("silver",), day
        ),
    ),
    "preference": (
        Topic(
            ("When you draft letters for me, could you close them with {v}, I find everything else too stiff?",),
            "How should letters for the user close?",
            ("letters", "close"),
            ("warm regards", "a plain goodbye", "nothing at all", "best wishes", "a line of verse"),
        ),
        Topic(
            ("I would sooner sleep on the floor than do without {v}.",),
            "What would the user not do without?",
            ("sleep", "floor", "without"),
            ("an open window", "my own pillow", "a night light", "thick curtains", "two blankets"),
        ),
    ),
    "superseded": (
        Topic(
            ("Forget what I said about the bakery, the order is for {v} rolls now.",),
            "For how many rolls is the order at the bakery now?",
            ("bakery", "rolls"),
            amount,
            first=("The order at the bakery is for {v} rolls.",),
        ),
        Topic(
            ("Scratch that, rehearsal will start at {v}, the hall was taken.",),
            "When does rehearsal start now?",
            ("rehearsal",),
            clock,
            first=("Rehearsal starts at {v} as always.",),
        ),
        Topic(
            ("The foreman has quit and was replaced by {v}.",),
            "Who is the foreman now?",
            ("foreman",),
            person,
            first=("Our foreman is {v}, a quiet man.",),
        ),
    ),
    "negation": (
        Topic(
            ("Whatever the brochure says, the cottage comes without {v}.",),
            "What does the cottage come without?",
            ("cottage",),
            ("bed linen", "a stove", "firewood", "a fence", "hot water"),
        ),
        Topic(
            ("My daughter has never once been to {v}, so do not assume it.",),
            "Where has the daughter never been?",
            ("daughter", "never"),
            ("a circus", "the opera", "an airport", "the mountains", "a cinema"),
        ),
    ),
    "path": (
        Topic(
            ("It took me an hour to see that the scanner had dropped everything into {v} instead.",),
            "Where did the scanner drop everything?",
            ("scanner", "dropped"),
            path,
        ),
        Topic(
            ("I left the revised contract in {v} for you to look at.",),
            "Where is the revised contract?",
            ("contract",),
            path,
            by="assistant",
        ),
    ),
    "url": (
        Topic(
            ("The landlord insists that we report damage through {v} and nowhere else.",),
            "Where must damage be reported?",
            ("damage", "landlord"),
            url,
        ),
    ),
    "identifier": (
        Topic(
            ("Somebody renamed the flag, and what used to be harmless is called {v} in the release.",),
            "What is the flag called in the release?",
            ("flag", "release"),
            identifier,
        ),
    ),
    "quoted": (
        Topic(
            ('On the last page of her diary there was only "{v}" and no date.',),
            "What stood on the last page of the diary?",
            ("diary", "page"),
            ("the kite came down", "he owes me a goose", "tomorrow we sail", "sold the clock", "all debts are paid"),
        ),
    ),
}
HELD_UNRULED: dict[str, tuple[Topic, ...]] = {
    "relation": (
        Topic(
            ("funny coincidence, the surgeon who operated on my knee is married to my {v}.",),
            "To whom is the surgeon married?",
            ("surgeon", "married"),
            ("old babysitter", "piano teacher", "niece's friend", "brother's boss", "first landlady"),
        ),
        Topic(
            ("it seems that the new vicar grew up with my {v}, they still write.",),
            "With whom did the vicar grow up?",
            ("vicar",),
            ("mother-in-law", "swimming coach", "late uncle", "wife's cousin", "old sergeant"),
        ),
    ),
    "cause": (
        Topic(
            ("the orchard was given up, mostly {v}, and nobody was sorry.",),
            "Why was the orchard given up?",
            ("orchard",),
            (
                "because of the wasps",
                "since the heirs quarrelled",
                "as the well ran dry",
                "because deer ate the bark",
            ),
        ),
        Topic(
            ("in case you wonder why we heat with pellets, {v}.",),
            "Why does the family heat with pellets?",
            ("heat", "pellets"),
            (
                "the gas line ends at the church",
                "my son sells them",
                "the chimney took nothing else",
                "oil made grandma cough",
            ),
        ),
    ),
    "order": (
        Topic(
            ("they put up the scaffolding {v}, which surprised all of us.",),
            "When was the scaffolding put up?",
            ("scaffolding",),
            (
                "before the permit came",
                "after the roof was done",
                "before anyone measured",
                "after the holidays had begun",
            ),
        ),
        Topic(
            ("she had already signed {v}, as it happens.",),
            "When had she signed?",
            ("signed",),
            (
                "before the flood",
                "after reading half of it",
                "before her husband heard",
                "after the second glass",
            ),
        ),
    ),
    "plain": (
        Topic(
            ("our letterbox is the one {v}, people miss it.",),
            "Which letterbox is the user's?",
            ("letterbox",),
            ("shaped like a barn", "behind the hedge", "with the dented lid", "painted over", "nailed to the oak"),
        ),
        Topic(
            ("the twins share {v} and fight over it daily.",),
            "What do the twins share?",
            ("twins",),
            ("a drum kit", "one skateboard", "a bunk bed", "a telescope", "one bathroom shelf"),
        ),
        Topic(
            ("grandpa keeps his medals {v}, nobody is to know.",),
            "Where does grandpa keep his medals?",
            ("grandpa", "medals"),
            ("in the flour tin", "under the doormat", "inside the clock", "in a sock", "behind the radiator"),
        ),
    ),
    "constraint": (
        Topic(
            ("keep in mind that i cannot {v} since the accident.",),
            "What can the user not do since the accident?",
            ("accident",),
            ("lift my arm", "climb ladders", "smell anything", "sit for long", "read small print"),
        ),
        Topic(
            ("it would be lovely to come along, though with me it always depends on {v}.",),
            "On what does it depend whether the user comes?",
            ("depends", "come"),
            ("the dog sitter", "my back", "the milking", "the tide tables", "whether he is sober"),
        ),
    ),
}  # fmt: skip
