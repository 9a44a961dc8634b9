"""What must hold of every plan, checked on the prompt that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import get_args

import orjson

from compression.budget import Policy, least_gain
from compression.conversation import Item
from compression.cost import Way
from compression.plan import NoPlan, Plan, Urgency
from compression.segments import Segment
from compression.view import View, fold, orphans, shown
from tests.compression.talks import FRAME, Talk, common_tokens, prompt_tokens, words


def check(talk: Talk, made: Plan | NoPlan, urgency: Urgency, policy: Policy | None = None) -> None:
    """`made`: what was planned on `talk` as it is now."""
    policy = policy or talk.policy
    assert talk.plan(urgency, policy) == made, "the same input gives another plan"
    assert orjson.loads(orjson.dumps(made.as_json())) == made.as_json()
    assert made.tokens_before == talk.tokens
    assert made.tokens_after >= 0
    allowed, fits = allowed_tokens(talk, urgency, policy), fitting_tokens(talk)
    _check_options(made, fits)
    if isinstance(made, NoPlan):
        _check_refusal(talk, made, urgency, policy)
        return
    after = talk.carried_out(made)
    _check_units(talk, made, policy)
    _check_merges(talk, made)
    _check_tokens(talk, made, after, urgency, allowed)
    _check_append_only(talk, made, after)
    _check_kept(talk, made, after, policy)
    check_shown(talk, after)


def allowed_tokens(talk: Talk, urgency: Urgency, policy: Policy) -> int:
    if urgency == "hard":
        return fitting_tokens(talk)
    return max(0, int(min(1.0, max(0.0, policy.trigger_ratio)) * talk.window) - talk.reserve)


def fitting_tokens(talk: Talk) -> int:
    """All but the least that an answer needs."""
    return talk.window - min(talk.reserve, talk.window // 16)


def check_shown(talk: Talk, view: View) -> None:
    """Every turn once, raw or in one segment; outputs after their calls; roles alternate where they did."""
    pinned = frozenset(talk.pinned)
    entries = shown(talk.turns, view, pinned)
    raw = [entry for entry in entries if isinstance(entry, str)]
    segments = [entry for entry in entries if isinstance(entry, Segment)]
    assert len(set(raw)) == len(raw)
    assert len({segment.id for segment in segments}) == len(segments)
    told = list(chain.from_iterable(segment.turn_ids for segment in segments))
    assert len(set(told)) == len(told), "a turn is told of twice"
    assert set(raw) | set(told) == {turn.id for turn in talk.turns}
    waiting = {turn.id for turn in talk.turns if any(item.type == "function_call" for item in turn.items)}
    ids = [turn.id for turn in talk.turns]
    bound = {id for a, b in pairwise(ids) if a in waiting for id in (a, b)}
    assert set(raw) & set(told) <= pinned | bound, "a turn stands raw and is told of, and nobody pinned it"
    assert pinned & set(ids) <= set(raw)
    folded = fold(talk.turns, view, pinned=pinned)
    assert orphans(folded.items) == []
    if _alternate(list(chain.from_iterable(turn.items for turn in talk.turns))):
        assert _alternate(folded.items)
    assert View.of_json(view.id or "", orjson.loads(orjson.dumps(view.as_json()))) == View(
        view.id or "", view.segments, view.elisions
    )


def _check_options(made: Plan | NoPlan, fits: int) -> None:
    for option in made.options:
        assert option.eligible == (option.why == "")
        assert option.tokens_after >= 0
        assert option.reprefill_tokens >= 0
        assert option.call_tokens >= 0
        assert option.brings >= 0 or not option.eligible
    if isinstance(made, Plan):
        able = [option for option in made.options if option.eligible and option.way != "keep"]
        enough = [option for option in able if option.tokens_after <= fits] or able
        best = max(enough, key=lambda option: option.worth)
        assert (best.way, best.tokens_after) == (made.way, made.tokens_after)
        assert made.options[0].way == "keep"
        assert {option.way for option in made.options} == set(get_args(Way)), "a way has no price and no reason"
        assert ("costs more" in made.why) == (best.worth < 0)
    elif made.reason not in ("off", "below_trigger"):
        assert not any(option.eligible for option in made.options if option.way != "keep")


def _check_refusal(talk: Talk, made: NoPlan, urgency: Urgency, policy: Policy) -> None:
    assert made.allowed_tokens == allowed_tokens(talk, urgency, policy)
    if made.reason == "off":
        assert policy.strategy == "off"
        assert urgency != "hard"
    elif made.reason == "below_trigger":
        assert made.tokens_before <= made.allowed_tokens
    elif made.reason == "floor":
        assert made.tokens_after > made.allowed_tokens
    elif made.reason == "gain":
        assert made.tokens_before - made.tokens_after < least_gain(talk.window)
    assert made.tokens_after <= made.tokens_before


def _check_units(talk: Talk, made: Plan, policy: Policy) -> None:
    """Ranges are turns in a row, whole units, of turns that stand raw and are not kept."""
    ids = [turn.id for turn in talk.turns]
    kept = {*ids[: max(0, policy.keep_first)], *ids[-max(1, policy.keep_last) :], *talk.pinned}
    covered = set(ids) - {entry for entry in talk.shown if isinstance(entry, str)}
    taken = [id for each in made.ranges for id in each.turn_ids]
    assert len(set(taken)) == len(taken)
    assert not set(taken) & (kept | covered)
    for each in made.ranges:
        at = ids.index(each.turn_ids[0])
        assert tuple(ids[at : at + len(each.turn_ids)]) == each.turn_ids
        assert 0 < each.budget_tokens < each.source_tokens
    for before, after in pairwise(talk.turns):
        if any(item.type == "function_call" for item in before.items):
            of = [next((r for r in made.ranges if turn.id in r.turn_ids), None) for turn in (before, after)]
            assert of[0] is of[1], "a range ends between a call and its output"


def _check_merges(talk: Talk, made: Plan) -> None:
    by_id = {segment.id: segment for segment in talk.view.segments}
    merged = [id for merge in made.merges for id in merge.segment_ids]
    assert len(set(merged)) == len(merged)
    order = [entry.id if isinstance(entry, Segment) else entry for entry in talk.shown]
    for merge in made.merges:
        sources = [by_id[id] for id in merge.segment_ids]  # none of this compaction
        at = order.index(merge.segment_ids[0])
        assert tuple(order[at : at + len(sources)]) == merge.segment_ids, "what is merged stands in a row"
        assert merge.turn_ids == tuple(id for source in sources for id in source.turn_ids)
        assert merge.rank == max(source.rank for source in sources) + 1
        assert 0 < merge.budget_tokens < sum(source.tokens for source in sources)


def _check_tokens(talk: Talk, made: Plan, after: View, urgency: Urgency, allowed: int) -> None:
    folded = talk.folded(after)
    assert prompt_tokens(folded, talk.overhead) == made.tokens_after
    assert made.tokens_after < made.tokens_before
    if urgency == "hard":
        assert made.tokens_after <= allowed
    else:
        assert made.tokens_before - made.tokens_after >= least_gain(talk.window)
    if urgency == "auto" and made.tokens_after > allowed:  # what is kept is past the trigger by itself
        room = fitting_tokens(talk) - made.tokens_after
        assert room >= 0
        assert made.tokens_before - made.tokens_after >= room // 2
    same = talk.overhead + common_tokens(talk.folded(), folded)
    assert made.first_changed <= same
    largest = max(sum(word[2] for word in words(fold([turn], View()))) for turn in talk.turns)
    assert same - made.first_changed <= max(largest, FRAME), "more of the prompt stays than the plan says"


def _check_append_only(talk: Talk, made: Plan, after: View) -> None:
    """Earlier segments stand as they did, in their order, but for those that were merged."""
    gone = {id for merge in made.merges for id in merge.segment_ids}
    old = [entry for entry in talk.shown if isinstance(entry, Segment) and entry.id not in gone]
    new = [entry for entry in shown(talk.turns, after, frozenset(talk.pinned)) if entry in old]
    assert new == old


def _check_kept(talk: Talk, made: Plan, after: View, policy: Policy) -> None:
    """Pins stand raw; other kept turns too, but for parts without whose cuts the prompt would not fit."""
    fits = fitting_tokens(talk)
    ids = [turn.id for turn in talk.turns]
    kept = {*ids[: max(0, policy.keep_first)], *ids[-max(1, policy.keep_last) :]}
    keys = [(cut.turn_id, cut.part, cut.index) for cut in made.cuts]
    assert len(set(keys)) == len(keys)
    assert not {cut.turn_id for cut in made.cuts} & talk.pinned
    seen = [entry for entry in shown(talk.turns, after, frozenset(talk.pinned)) if isinstance(entry, str)]
    assert {cut.turn_id for cut in made.cuts} <= set(seen), "what no one sees is cut"
    last_resort = [cut for cut in made.cuts if cut.turn_id in kept]
    if last_resort:
        assert made.tokens_after <= fits
        freed = last_resort[-1].tokens - last_resort[-1].budget_tokens
        assert made.tokens_after + freed > fits, "a kept turn was cut, and it need not have been"
    sent = list(talk.folded(after).items)
    for turn in talk.turns:
        if turn.id in talk.pinned:
            assert _stands(list(turn.items), sent)


def _stands(part: Sequence[Item], whole: Sequence[Item]) -> bool:
    return any(list(whole[at : at + len(part)]) == list(part) for at in range(len(whole) - len(part) + 1))


def _alternate(items: Sequence[Item]) -> bool:
    """User and assistant take turns; what an assistant says, thinks and calls in a row is one message."""
    said = []
    for item in items:
        role = "tool" if item.type == "function_call_output" else item.role or "assistant"
        if not said or role == "user" or said[-1] != role:
            said.append(role)
    return (
        bool(said)
        and said[0] == "user"
        and all(
            (a, b) in {("user", "assistant"), ("assistant", "user"), ("assistant", "tool"), ("tool", "assistant")}
            for a, b in pairwise(said)
        )
    )
