"""The rest of a conversation: questions, advice and small talk in which the planted facts stand.

Two sources: sentences of our own with figures and names drawn into them, and the public dialogues of MT-Bench-101
where they are at hand. Most of what is said is worth nothing later, though much of it holds numbers, names and quotes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from bench.compaction.bank import FIRST_NAMES, day

# a question, and the sentences that an answer to it is made of
ADVICE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "baking": (
        ("Why is my loaf so dense?", "How long should the dough rest?", "Can I bake this in a small oven?"),
        (
            "Dense crumb nearly always means that the dough did not ferment long enough.",
            "Give it {n} minutes at about {m} degrees before you shape it.",
            "A wetter dough is harder to handle but opens up more.",
            "Bakers call the poke test reliable: the dent should come back slowly.",
            "Steam during the first {m} minutes keeps the crust soft while the loaf expands.",
            "If the bottom burns, put a second tray below the first.",
            "Flour differs from mill to mill, so write down what you used.",
            "{name}'s book suggests folding every {m} minutes, which works well.",
            "Salt slows the yeast a little, so add it after the first rest.",
        ),
    ),
    "travel": (
        ("What should I see in two days?", "Is the night train worth it?", "How do I avoid the crowds?"),
        (
            "Two days are enough for the old town and one longer walk.",
            "The first tram leaves at {n} past the hour and is rarely full.",
            "Most museums close on Mondays, and the large one needs a ticket bought in advance.",
            "Many visitors praise the market hall that opened in 19{m}.",
            "A seat in the quiet coach costs about {n} more and is worth it.",
            "Carry some cash, since small cafés often do not take cards.",
            "The view from the hill is best about an hour before sunset.",
            "Locals recommend the soup at {name}'s place near the bridge.",
            "If it rains, the covered passages make a pleasant detour.",
        ),
    ),
    "code": (
        ("Why is this query slow?", "How do I test code that uses the clock?", "Should I split this module?"),
        (
            "The planner scans the whole table because the predicate wraps the column in a function.",
            "An index on both columns brings such a query from {n} ms down to about {m}.",
            "Pass the clock in as a parameter, then a test can hand over a fixed one.",
            "Splitting a module pays once two people change it for different reasons.",
            'Look for the line "rows removed by filter" in the output of `EXPLAIN ANALYZE`.',
            "Retry only what is safe to do twice, and give up after {m} attempts.",
            "A log line without an id is of little use when {n} requests run at once.",
            "Keep functions short enough that their names can be honest.",
            "The standard library's `functools.cache` is fine here, as the inputs are few.",
        ),
    ),
    "health": (
        ("How can I sleep better?", "Is it fine to run with a cold?", "What helps against a stiff neck?"),
        (
            "Going to bed at the same hour does more than any supplement.",
            "Light in the first {m} minutes of the day sets the inner clock.",
            "A short walk after lunch helps more than a second coffee.",
            "With a fever you should not run at all; with a mild cold, slowly and briefly.",
            "Heat for {m} minutes and gentle turning usually loosen a stiff neck.",
            "If it has not improved after {n} days, have it looked at.",
            "A study of {n} adults found that regular meals mattered most.",
            "Screens late in the evening delay sleep by about {m} minutes on average.",
            "Drink when you are thirsty; fixed amounts are mostly folklore.",
        ),
    ),
    "garden": (
        ("When should I prune the roses?", "Why do my tomatoes split?", "What grows in deep shade?"),
        (
            "Prune when the forsythia is in flower, not before.",
            "Tomatoes split when heavy watering follows a dry spell.",
            "Mulch of about {m} cm keeps the moisture even.",
            "Ferns, hostas and ivy put up with deep shade.",
            "Cut above an outward-facing bud at a slight angle.",
            "Compost is ready when it smells of forest, often after {n} days.",
            "Slugs dislike rough ground, though no barrier stops all of them.",
            "The society's leaflet by {name} lists {m} varieties for heavy soil.",
            "Water in the morning, so that leaves dry before night.",
        ),
    ),
    "money": (
        ("Should I fix the rate now?", "How large should a reserve be?", "Is it worth refinancing?"),
        (
            "Fixing the rate buys certainty, and certainty has a price of about {m} basis points.",
            "A reserve of three to six months of spending is the usual advice.",
            "Refinancing pays off when the saving covers the fees within {m} months.",
            "Read what the bank calls early repayment, as the fee can reach {n}.",
            "Keep the reserve where you can reach it within a day.",
            "An index fund with costs below a quarter of a percent is hard to beat.",
            "Spreading purchases over time mostly helps you to sleep.",
            "In {year} many lenders changed their terms, so compare anew.",
            "Write down what you want the money for before you choose.",
        ),
    ),
    "music": (
        ("How do I practise scales without getting bored?", "Which strings should I buy?", "How do I read faster?"),
        (
            "Change the rhythm every {m} bars and the fingers stay awake.",
            "Medium strings suit most instruments; light ones sound thin but are easy to press.",
            "Read one bar ahead of what you play, slowly, without stopping.",
            "Practise the hard {m} bars on their own before you play through.",
            "Record yourself once a week and listen a day later.",
            "The edition by {name} has better fingerings than most.",
            "A metronome at {n} is quick enough for this piece.",
            "Tension in the shoulders is the usual cause of a harsh tone.",
            "Learn the left hand first when it carries the harmony.",
        ),
    ),
    "house": (
        ("Why is there mould in the corner?", "Which insulation would you take?", "How do I quiet the radiator?"),
        (
            "Mould in a corner means that the wall is cold there and the air damp.",
            "Air the room fully for {m} minutes rather than tilting the window all day.",
            "Wood fibre is pleasant to work with but thicker than foam for the same value.",
            "A knocking radiator usually holds air: open the valve until water comes.",
            "Leave {m} cm between the cupboard and the outer wall.",
            "The grant covers up to {n} of the cost if you apply before the work starts.",
            "Lime paint lets the wall dry and gives mould little to live on.",
            "Ask for the data sheet, since names on the packaging say nothing.",
            "A hygrometer for a few coins tells you more than guessing does.",
        ),
    ),
}
SMALL_TALK = (
    "I have been turning this over in my head all week.",
    "It rained the whole afternoon here, so I had time to think.",
    "thanks, that was clearer than what i found elsewhere.",
    "My coffee has gone cold while I typed this.",
    "Sorry for the long message.",
    "I told {name} about it and we ended up arguing for {m} minutes.",
    "the street is being dug up again and it is loud.",
    "We watched an old film yesterday and I fell asleep halfway.",
    "I am on the bus, so forgive the typos.",
    "It took me {n} tries to get this far.",
    "Somebody recommended this to me ages ago.",
    "i am not in a hurry, take your time.",
    "The children are loud today and I can hardly read.",
    "I read something about it in a magazine, on page {m} or so.",
    "Maybe I am overthinking it.",
    "My brother says I ask too many questions.",
    "We had soup again, third day in a row.",
    "that reminds me of a summer by the lake, long ago.",
    "I wrote this down on {day} and never came back to it.",
    "Honestly I did not expect it to work at all.",
    "the neighbours are practising the trumpet, badly.",
    "I will try it on the weekend and see.",
    "Last time somebody told me the opposite.",
    "It is getting dark early now.",
)
PLEASANTRIES = ("Good question.", "Happy to help.", "That makes sense.", "Thanks for the details.", "Understood.")
CJK_CHAT: dict[str, tuple[tuple[str, str], ...]] = {
    "zh": (
        (
            "你觉得周末适合去爬山吗？",
            "如果天气好，周末爬山很不错。记得早点出发，带够水，山上风大，最好多带一件外套。",
        ),
        ("怎么做红烧肉才不腻？", "先把肉焯水，再用小火慢炖。加一点山楂或者陈皮，可以解腻，收汁时不要离开锅边。"),
        ("有什么好看的纪录片推荐吗？", "可以看看关于海洋和古建筑的纪录片，画面很美，解说也不啰嗦，适合晚饭后慢慢看。"),
    ),
    "ja": (
        (
            "週末におすすめの過ごし方はありますか。",
            "天気がよければ、近くの川沿いを散歩するのがおすすめです。帰りに小さな喫茶店に寄るのもいいですね。",
        ),
        (
            "味噌汁をおいしく作るこつは？",
            "だしをきちんと取り、味噌は火を止めてから溶き入れてください。煮立てると香りが飛んでしまいます。",
        ),
    ),
    "ko": (
        (
            "요즘 볼 만한 책이 있을까요?",
            "가볍게 읽을 수 있는 수필집을 권해 드려요. 하루에 한 편씩 읽으면 부담이 없고 여운도 오래 남습니다.",
        ),
        (
            "김치찌개를 맛있게 끓이려면요?",
            "잘 익은 김치를 먼저 볶은 뒤에 물을 넣고 오래 끓이세요. 두부는 마지막에 넣는 것이 좋습니다.",
        ),
    ),
}
SHORTEST_ANSWER = 150  # characters: shorter ones of the dialogues are no answer of usual length


def filled(random: Random, sentence: str) -> str:
    if "{" not in sentence:
        return sentence
    return sentence.format(
        n=random.randint(20, 99),
        m=random.randint(11, 60),
        name=random.choice(FIRST_NAMES),
        year=random.randint(2008, 2024),
        day=day(random),
    )


def own_exchanges(random: Random) -> Iterator[tuple[str, str]]:
    """A user's message and its answer, without end. An answer is 60 to 180 words."""
    while True:
        domain = random.choice(tuple(ADVICE))
        questions, sentences = ADVICE[domain]
        picked = random.sample(sentences, random.randint(5, len(sentences)))
        opening = [random.choice(PLEASANTRIES)] if random.random() < 0.4 else []
        yield random.choice(questions), " ".join((*opening, *(filled(random, each) for each in picked)))


def read_dialogues(file: Path) -> list[list[tuple[str, str]]]:
    """MT-Bench-101: its dialogues in which answers are of usual length."""
    dialogues = []
    for line in file.read_text().splitlines():
        turns = [(turn["user"], turn["bot"]) for turn in json.loads(line)["history"]]
        if sum(len(bot) for _, bot in turns) >= SHORTEST_ANSWER * len(turns):
            dialogues.append(turns)
    return dialogues


def public_exchanges(random: Random, dialogues: list[list[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    """The exchanges of one dialogue after another, in random order, each once; then ours."""
    for dialogue in random.sample(dialogues, len(dialogues)):
        yield from dialogue
    yield from own_exchanges(random)
