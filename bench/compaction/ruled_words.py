"""Planted facts that a guard is asked to keep by what is said of them: preferences, values superseded or denied, facts
in other scripts, and what tools answered.
"""

from __future__ import annotations

from bench.compaction.bank import Topic, amount, clock, count, day, path, person, reference, url

PREFERENCES = (
    Topic(
        ("For breakfast I prefer {v}.", "In the morning I want {v} and nothing else."),
        "What does the user prefer for breakfast?",
        ("breakfast", "morning", "prefer"),
        ("rye bread", "plain oatmeal", "cold noodles", "goat cheese", "stewed plums", "smoked mackerel"),
    ),
    Topic(
        ("Please give me your answers as {v}.", "I like answers best as {v}."),
        "How does the user want the answers?",
        ("answer",),
        ("short bullet lists", "one long paragraph", "numbered steps", "a small table", "questions back to me"),
    ),
    Topic(
        ("On trains I always take {v}.", "I prefer {v} when we go by train."),
        "What does the user take on trains?",
        ("train",),
        ("the quiet carriage", "an aisle seat", "the upper berth", "a seat facing backwards", "the dining car"),
    ),
    Topic(
        ("My favourite colour for walls is {v}.", "I would paint every wall {v} if I could."),
        "Which colour does the user like for walls?",
        ("wall", "colour", "paint"),
        ("ochre", "sage green", "petrol blue", "brick red", "pale lilac", "charcoal"),
    ),
    Topic(
        ("When I work I listen to {v}.", "I work best with {v} on."),
        "What does the user listen to at work?",
        ("work", "listen"),
        ("harpsichord music", "rain recordings", "brass bands", "cricket commentary", "bossa nova", "sea shanties"),
    ),
)

SUPERSEDED = (
    Topic(
        ("They moved the meeting: it is at {v} now.", "the meeting is at {v} instead of {old}"),
        "At what time is the meeting now?",
        ("meeting",),
        clock,
        first=("The meeting is at {v}.", "We meet at {v}, the usual meeting."),
    ),
    Topic(
        ("We changed the caterer, it is {v} now.", "The catering will be done by {v} after all, no longer by {old}."),
        "Who does the catering now?",
        ("cater",),
        person,
        first=("The caterer is {v}.", "The catering is done by {v}."),
    ),
    Topic(
        ("My new desk is number {v}.", "I was given another desk, {v} now."),
        "Which desk does the user have now?",
        ("desk",),
        count,
        first=("At the office I have desk {v}.", "My desk is number {v}."),
    ),
    Topic(
        ("The budget for the garden was raised to {v}.", "We have {v} for the garden now, not {old}."),
        "How large is the budget for the garden now?",
        ("garden", "budget"),
        amount,
        first=("The budget for the garden is {v}.", "We put {v} aside for the garden."),
    ),
    Topic(
        ("The trip is off to {v} now.", "Change of plan: we travel to {v}, not to {old}."),
        "Where does the trip go now?",
        ("trip", "travel"),
        ("Tallinn", "Porto", "Ghent", "Trieste", "Bergen", "Krakow", "Valletta"),
        first=("The trip in spring goes to {v}.", "In spring we travel to {v}."),
    ),
    Topic(
        ("The server was moved to {v}.", "New address of the server: {v}."),
        "What is the address of the server now?",
        ("server",),
        url,
        first=("The server answers at {v}.", "the server is at {v}"),
    ),
)

NEGATIONS = (
    Topic(
        ("I do not eat {v}.", "No {v} for me, I never eat it."),
        "What does the user not eat?",
        ("eat", "no", "not", "never"),
        ("celery", "oysters", "marzipan", "liver", "aubergine", "coriander"),
    ),
    Topic(
        ("We are not going to {v} this year.", "It will not be {v} this summer, that much is settled."),
        "Where is the family not going this year?",
        ("not", "going", "summer", "year"),
        ("Brittany", "Madeira", "Lapland", "Corsica", "Galicia", "Sardinia"),
    ),
    Topic(
        ("The garage has no {v}.", "There isn't any {v} in the garage."),
        "What does the garage not have?",
        ("garage",),
        ("running water", "daylight", "heating", "power socket", "back door"),
    ),
    Topic(
        ("Never call my {v} about this.", "Please don't involve my {v}."),
        "Whom must nobody call about this?",
        ("call", "involve", "never", "don"),
        ("stepfather", "landlady", "old employer", "brother-in-law", "godmother"),
    ),
    Topic(
        ("The report must not mention the {v}.", "Leave the {v} out of the report."),
        "What must the report not mention?",
        ("report",),
        ("refund", "second auditor", "burst pipe", "loan from the bank", "old supplier"),
    ),
)

CJK = (
    Topic(("我的航班号是{v}。", "回程坐{v}这个航班。"), "我的航班号是什么？", ("航班",),
          ("MU5735", "CA1832", "HU7609", "CZ3104", "ZH9871"), language="zh"),
    Topic(("我妹妹住在{v}。", "妹妹搬到了{v}。"), "我妹妹住在哪里？", ("妹妹",),
          ("平江路", "解放碑", "鼓浪屿", "回民街", "春熙路"), language="zh"),
    Topic(("我对{v}过敏。", "医生说我不能碰{v}，会过敏。"), "我对什么过敏？", ("过敏",),
          ("花生", "芒果", "青霉素", "虾", "荞麦"), language="zh"),
    Topic(("孩子的班主任是{v}老师。", "班主任换成了{v}老师。"), "孩子的班主任是谁？", ("班主任",),
          ("欧阳静", "司马远", "诸葛琳", "上官云", "慕容海"), language="zh"),
    Topic(("予約番号は{v}です。", "旅館の予約番号は{v}でした。"), "予約番号は何ですか。", ("予約",),
          ("ヤ4471", "カ9023", "ミ3158", "サ7706", "ハ5540"), language="ja"),
    Topic(("母は{v}が苦手です。", "母が苦手なのは{v}です。"), "母が苦手なものは何ですか。", ("母",),
          ("納豆", "高い所", "雷", "人混み", "船"), language="ja"),
    Topic(("회의는 {v}에서 해요.", "이번 회의 장소는 {v}예요."), "회의는 어디에서 해요?", ("회의",),
          ("별관 지하", "옥상 정원", "서쪽 강당", "구내 식당", "자료실"), language="ko"),
)  # fmt: skip

TOOLS = (
    Topic(("status",), "What did the look-up say is the status of the shipment?", ("status", "shipment"),
          ("held at customs", "awaiting pallet", "returned to depot", "damaged in sorting", "split in two"), by="tool"),
    Topic(("quota_left",), "How much quota did the check say is left?", ("quota",), count, by="tool"),
    Topic(("assigned_to",), "To whom is the repair assigned, as the look-up said?", ("assigned",), person, by="tool"),
    Topic(("warehouse",), "In which warehouse is the stock, by the look-up?", ("warehouse",), reference, by="tool"),
    Topic(("log_file",), "Which log file did the check name?", ("log",), path, by="tool"),
    Topic(("valid_until",), "Until when is the certificate valid, as the check said?", ("valid",), day, by="tool"),
)  # fmt: skip
