"""What can be cut from the ends of a clause, and which sentences say nothing: greetings, politeness, hedges, offers.

Only whole words at the ends and known empty phrases go; the inside of a clause stays as it was said, so that a value
of several words ("under my bed") survives letter by letter.
"""

from __future__ import annotations

import re

from compression.words import CHAT_WORDS, content_words, is_cjk, joined

_LEAD = re.compile(
    r"^(?:[\s,.:;!?…\-–—*]+|(?:"
    + joined(
        r"""
        oh|ah|um|uh|hmm+|well|so|and|also|but|anyways?|okay|ok|alright|yeah|yes|yep|sure|right|hey|hi|hello|hi there|
        good (?:morning|evening|afternoon)|dear [a-z]+|thanks(?: so much| a lot| again)?|
        thank you(?: so much| very much| again)?|great|perfect|awesome|cool|nice|sorry|please|actually|
        basically|honestly|
        frankly|obviously|of course|in fact|to be honest|as i said|as you know|as (?:i )?mentioned(?: before|
         earlier)?|
        by the way|btw|fyi|for (?:your|the) (?:information|record)|just so you know|just to (?:let you know|be clear)|
        you know|i mean|i guess|i suppose|like(?=,)|
        (?:one|another) (?:more )?thing(?: is(?: that)?| to (?:note|know)(?: is(?: that)?)?)?|
        i should (?:also )?(?:mention|say|add|note)(?: that)?|i forgot to (?:mention|say|tell you)(?: that)?|
        i(?:'d| would) (?:also )?like to (?:mention|add|say|note)(?: that)?|
        i (?:just )?want(?:ed)? to (?:mention|let you know|say|add|tell you)(?: that)?|
        let me (?:also )?(?:mention|add|tell you)(?: that)?|
        (?:please )?(?:note|remember|keep in mind|bear in mind|be aware|don't forget)(?: that)?(?=\s|:|,)|
        it(?:'s| is) (?:worth|important) (?:noting|mentioning|to note|to mention|to remember)(?: that)?|
        in (?:summary|conclusion|addition|general)|(?:first|second|third|final|last)ly|additionally|
        furthermore|moreover|
        overall|however|therefore|then|besides|meanwhile|
        übrigens|ja|nein,? also|na ja|naja|ach|hallo|danke|vielen dank|eigentlich|ehrlich gesagt|nur zur info|
        zur info|
        wie gesagt|ich wollte (?:noch )?sagen,? dass|ach ja|und|aber|bitte|
        au fait|en fait|bon|alors|ah oui|bonjour|merci(?: beaucoup)?|d'ailleurs|pour info|et|mais|
        je voulais (?:aussi )?(?:dire|préciser) que|
        por cierto|bueno|pues|hola|gracias|además|y|pero|allora|comunque|tra l'altro|ciao|grazie
        """
    )
    + r")(?=[\s,.:;!?…\-–—]|$)[\s,.:;!?…\-–—]*)",
    re.IGNORECASE,
)
_LEAD_WORDS = frozenset(  # one of them begins every phrase above: others need no look
    joined(
        """
        oh ah um uh hmm hmmm well so and also but anyway anyways okay ok alright yeah yes yep sure right hey
        hi hello good
        dear thanks thank great perfect awesome cool nice sorry please actually basically honestly frankly
        obviously of in
        to as by btw fyi for just you like i i'd one another let note remember keep bear be don't it it's
        firstly secondly
        thirdly finally lastly additionally furthermore moreover overall however therefore then besides
        meanwhile übrigens ja
        nein na naja ach hallo danke vielen eigentlich ehrlich nur zur wie ich und aber bitte au en bon alors
        bonjour merci
        d'ailleurs pour et mais je por bueno pues hola gracias además y pero allora comunque tra ciao grazie
        """,
        " ",
    ).split()
)
_LEAD_CJK = re.compile(
    r"^(?:[\s，,、。！!：:]+|"
    + joined(
        r"""
        顺便(?:说一下|说一句|提一下|一提)?|对了|另外|其次|首先|还有|那么|嗯+|哦+|啊+|好的|好吧|谢谢(?:你|您)?|你好|您好|请注意|请记住|
        需要说明的是|值得一提的是|总之|因此|所以|而且|并且|但是|不过|然后|
        ちなみに|ところで|あの+|えっと|えーと|そういえば|それから|また|まず|次に|こんにちは|ありがとう(?:ございます)?|はい|なお|そして|
        でも|だから|では|じゃあ|
        그런데|그리고|참고로|안녕하세요|감사합니다
        """
    )
    + ")"
)
_REQUEST = re.compile(
    "^(?:"
    + joined(
        r"""
        (?:can|could|would|will) you (?:please |kindly |maybe |possibly |also )*|please |
        i(?:'d| would) (?:like|love) (?:you )?(?:to )?|i need (?:you )?to |
        i(?:'m| am) (?:looking for|wondering(?: if| whether)?)\s?|i was (?:wondering|hoping)(?: if| whether)?\s?|
        i want (?:you )?to know |do you (?:know|have)(?: of| any)*\s|
        kannst du (?:mir )?(?:bitte )?|können sie (?:mir )?(?:bitte )?|könntest du (?:mir )?(?:bitte )?|
        peux-tu |pouvez-vous |pourriez-vous |est-ce que (?:tu peux|vous pouvez) |puedes |podrías |puoi |potresti
        """
    )
    + ")(?:(?:please |me |us |mir |m')*(?:"
    + joined(
        r"""
        suggest|recommend|tell|give|explain|help(?: me| us)?(?: with| to)?|show|provide|share|describe|list|
        write|make|
        find|know|erklären|sagen|helfen|zeigen|expliquer|dire|aider|donner|decirme|ayudarme|explicar
        """
    )
    + r")\s+)?(?:(?:me|us|mir|moi)\s+)?(?:(?:with|about)\s+)?(?:(?:some|any|a few|more|the best way to)\s+)*",
    re.IGNORECASE,
)
_TAIL = re.compile(
    r"(?:[\s,;:，、；：\-–—]+|(?:,?\s+(?:"
    + joined(
        r"""
        please|thanks|thank you|by the way|btw|you know|i guess|i think|i suppose|
        if (?:that|it) (?:helps|matters|makes sense|is possible|'s possible)|if possible|as well|too|though|
        in case (?:that|it) (?:helps|matters)|for (?:your|the) (?:information|record)|just so you know|fyi|lol|haha|
        bitte|danke|übrigens|merci|s'il (?:te|vous) plaît|svp|por favor|gracias|per favore|grazie|right|okay|ok|
        so (?:please )?(?:keep|bear) (?:that|it|this) in mind
        """
    )
    + r"))|(?:谢谢|吧|呢|啊|哦|呀|よね|ね))[\s.!。！]*$",
    re.IGNORECASE,
)
_TAIL_WORDS = frozenset(  # one of them ends every phrase above
    joined(
        """
        please thanks you way btw know guess think suppose helps matters sense possible well too though
        information record
        fyi lol haha bitte danke übrigens merci plaît svp favor gracias favore grazie right okay ok mind
        """,
        " ",
    ).split()
)
_HEDGE = re.compile(
    r"\s(?:kind of|sort of|more or less|you know|i mean|i guess|i suppose|like i said|as i said|to be honest|"
    r"if you will|so to speak)(?=[\s,])(?:,)?|"
    r",\s(?:of course|actually|honestly|basically|however|for example|for instance|though|you know|by the way)(?=,)|"
    r"(?<=[\s])(?:really|basically|actually|literally|honestly|quite|simply|definitely|absolutely|totally)\s(?=[a-z])",
    re.IGNORECASE,
)
_HEDGE_WORDS = frozenset(
    joined(
        """
        of less know mean guess suppose said honest will speak course, course actually actually, honestly honestly,
        basically basically, however, example, instance, though, know, way, really literally quite simply definitely
        absolutely totally mean, guess, suppose, said, honest, will, speak, less,
        """,
        " ",
    ).split()
)
_EMPTY = re.compile(
    "^(?:"
    + joined(
        r"""
        (?:you're|you are) (?:very )?welcome|
        (?:i'm|i am) (?:glad|happy|here|excited|thrilled|sorry to hear|always here)\b(?!.*\d).*|
        (?:i'd|i would|i'll) be (?:happy|glad|delighted) to\b(?!.*\d).*|let me know\b.*|feel free to\b.*|
        (?:i )?hope (?:this|that|it|you|these)\b.*|
        (?:that|it|this)(?:'s| is| sounds| looks)? (?:a )?(?:really )?(?:great|good|nice|cool|wonderful|
        helpful|fantastic|
        excellent|amazing|awesome|perfect|interesting)\b(?:\W+\w+){0,4}\W*|
        (?:that|it|this) (?:really )?(?:helps?|makes sense|works)\b(?:\W+\w+){0,4}\W*|
        (?:what|how) (?:a |an )?(?:great|good|lovely|wonderful|fantastic|excellent|exciting|interesting)\b.{0,60}|
        (?:great|good|excellent|interesting) (?:question|idea|choice|point|job|luck)\b.{0,40}|
        congratulations\b.{0,60}|
        here (?:are|is|'s)\b.{0,120}:|here are (?:some|a few)\b.*|sounds (?:great|good|like a plan)\b.{0,30}|
        no (?:problem|worries)\b.{0,20}|got it\b.{0,20}|i (?:see|understand|appreciate\b.{0,60})|
        (?:as an ai|i'm just an ai)\b.*|(?:do you have|are there|is there) any(?:thing)? (?:other|else|more)\b.*|
        (?:would you like|do you want|want me|shall i) (?:me )?to\b.{0,100}\?|is there anything\b.*|
        what do you think\W*|
        good (?:morning|evening|afternoon|night|day)\W*|how are you\b.{0,30}|(?:have|enjoy) (?:a|your)\b.{0,40}|
        remember to\b.{0,20}|(?:noted|understood|will do|done|okay|ok|sure|yes|no)\W*|
        (?:verstanden|notiert|compris|noté|entendido)\W*|gern(?:e)? geschehen.*|gute frage.*|ich hoffe,? .*|
        lass(?:en sie)? (?:es )?mich wissen.*|ich helfe (?:dir|ihnen) gern.*|das (?:klingt|ist) (?:gut|toll|super)\W*|
        bonne question.*|j'espère que.*|n'hésite[zs]? pas.*|avec plaisir.*|je suis (?:ravi|heureux).*|
        ¡?buena pregunta.*|espero que.*|no dudes.*|con gusto.*|
        .{0,6}(?:希望.{0,12}(?:帮助|有用|帮到)|如果.{0,8}(?:问题|需要).{0,20}(?:告诉|随时|联系).*|很高兴.{0,12}|不客气|好问题|
        当然可以|没问题|祝你.*|以下是.{0,30}|明白了|好的|谢谢.{0,8})\W*|
        .{0,4}(?:お役に立て.*|ご質問.*お気軽に.*|どういたしまして|わかりました|承知.*しました|もちろんです|かしこまりました|
        よろしくお願い.*|以下の.{0,20}です)\W*
        """
    )
    + ")$",
    re.IGNORECASE | re.DOTALL,
)


def trim(clause: str) -> str:
    """A clause without opening fillers, closing politeness and hedges."""
    text = " ".join(clause.split())
    text = text.rstrip(' .!。！…"”»').lstrip('"“«') if text.count('"') % 2 else text.rstrip(" .!。！…")
    wide = is_cjk(text)
    for _ in range(6):
        shorter = (_LEAD_CJK if wide else _LEAD).sub("", text, count=1) if wide or _may_lead(text) else text
        if shorter == text:
            break
        text = shorter
    for _ in range(3):
        shorter = _TAIL.sub("", text) if wide or _may_trail(text) else text
        if shorter == text:
            break
        text = shorter
    if not _HEDGE_WORDS.isdisjoint(text.lower().split(" ")):
        text = _HEDGE.sub("", text)
    return text.strip()


def _may_lead(text: str) -> bool:
    return not text[:1].isalnum() or text.split(" ", 1)[0].rstrip(",.:;!?…-–—").lower() in _LEAD_WORDS


def _may_trail(text: str) -> bool:
    return text[-1:] in ",;:-–—" or text.rsplit(" ", 1)[-1].lower() in _TAIL_WORDS


def is_empty(sentence: str) -> bool:
    """Whether a sentence is one of the known ones that say nothing."""
    return _EMPTY.match(sentence) is not None


def asked_for(question: str) -> str:
    """A question without "could you please tell me": what is asked about."""
    return _REQUEST.sub("", question, count=1)


def says_something(text: str) -> bool:
    """At least one word that is neither a function word nor a word of chat."""
    if len(text) > 60 or any(map(str.isdigit, text)):
        return True
    return any(word not in CHAT_WORDS for word in content_words(text))
