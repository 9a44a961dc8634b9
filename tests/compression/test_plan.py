"""A plan, one documented behaviour at a time. That nothing breaks it: test_plan_properties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from compression.budget import Policy, share
from compression.cuts import MASK_TOKENS
from compression.ground import FRAME_TOKENS, LEAST_SEGMENT, MARKER_TOKENS
from compression.merges import MERGE_SHARE
from compression.plan import NoPlan, Plan, Range, SizedPart, SizedTurn, plan
from compression.ranges import FRESH
from compression.segments import Segment

WINDOW = 8192
ALLOWED = 5734 - 512  # 0.70 of the window, less the answer's reserve
TARGET = 3276  # 0.40 of it


def turns(first: int, last: int, tokens: int = 300, **more: Any) -> list[SizedTurn]:
    return [SizedTurn(f"t{at}", tokens, **more) for at in range(first, last + 1)]


def message(id: str, tokens: int, kind: Any = "oversized", beside: int = 0) -> SizedTurn:
    """A turn that is one part."""
    return SizedTurn(id, tokens, parts=(SizedPart("input", 0, tokens, kind, beside),))


def segment(id: str, tokens: int, *turn_ids: str, rank: int = 0) -> Segment:
    return Segment(id, turn_ids, "x", tokens, "model", rank)


def planned(path: list[SizedTurn], segments: tuple[Segment, ...] = (), **given: Any) -> Plan | NoPlan:
    asked = {"window": WINDOW, "reserve_tokens": 512, "overhead_tokens": 300, "policy": Policy(), **given}
    return plan(path, segments, **asked)


def made(path: list[SizedTurn], segments: tuple[Segment, ...] = (), **given: Any) -> Plan:
    result = planned(path, segments, **given)
    assert isinstance(result, Plan), result
    return result


def refused(path: list[SizedTurn], segments: tuple[Segment, ...] = (), **given: Any) -> NoPlan:
    result = planned(path, segments, **given)
    assert isinstance(result, NoPlan), result
    return result


def ids(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"t{at}" for at in range(first, last + 1))


def test_the_drawing() -> None:
    path = [*turns(1, 4), *turns(5, 7, 1400), *turns(8, 8, pinned=True), *turns(9, 9), *turns(10, 12, 700)]
    segments = (segment("s1", 60, "t2", "t3"), segment("s2", 40, "t4"))
    plan = made(path, segments)
    assert [each.turn_ids for each in plan.ranges] == [ids(5, 7), ("t9",)]
    assert (plan.way, plan.merges, plan.cuts) == ("summarize", (), ())
    kept = 300 + 300 + (60 + 40) + 300 + 3 * 700
    assert plan.tokens_before == kept + FRAME_TOKENS + 3 * 1400 + 300
    assert plan.tokens_after == kept + 2 * FRAME_TOKENS + 3 * 40 + 40
    assert plan.first_changed == 300 + 300 + (60 + 40), "the segment is appended to the message that stands"


def test_the_trigger_counts_the_reserve() -> None:
    path = turns(1, 17)
    assert refused(path, overhead_tokens=ALLOWED - 17 * 300).reason == "below_trigger"
    assert made(path, overhead_tokens=ALLOWED - 17 * 300 + 1).tokens_after <= TARGET
    assert refused(path, overhead_tokens=ALLOWED - 17 * 300 + 1, reserve_tokens=511).reason == "below_trigger"


def test_as_few_of_the_oldest_turns_go_as_bring_the_prompt_to_the_target() -> None:
    path = turns(1, 18)
    plan = made(path)
    assert plan.ranges == (Range(ids(2, 11), 3000, 400),)
    assert plan.tokens_after == 300 + 8 * 300 + FRAME_TOKENS + 400 <= TARGET
    assert plan.tokens_after + 260 > TARGET


def test_off_and_nothing_and_gain_and_floor_are_refused_with_their_numbers() -> None:
    long = turns(1, 30)
    off = refused(long, policy=Policy(strategy="off"))
    assert (off.reason, off.tokens_before, off.allowed_tokens) == ("off", 9300, ALLOWED)
    assert refused(turns(1, 4, 2000)).reason == "nothing"
    gain = refused([*turns(1, 1), *turns(2, 2, 350), *turns(3, 5)], overhead_tokens=ALLOWED - 1500)
    assert (gain.reason, gain.tokens_before - gain.tokens_after) == ("gain", 350 - 40 - FRAME_TOKENS)
    floor = refused(long, overhead_tokens=6000)
    assert floor.reason == "floor"
    assert floor.tokens_after > ALLOWED
    assert whys(floor)["summarize"] == f"{floor.tokens_after} tokens would still be left, {ALLOWED} are allowed"
    assert orjson.loads(orjson.dumps(floor.as_json()))["options"][0]["why"] == "15000 tokens do not fit, 7680 do"


def whys(made: Plan | NoPlan) -> dict[str, str]:
    return {option.way: option.why for option in made.options}


def test_every_way_has_its_price_or_why_it_is_not_open() -> None:
    summarised = made(turns(1, 18))
    assert whys(summarised) == {
        "keep": f"past the trigger at {ALLOWED} tokens",
        "elide": "nothing that may be cut out stands outside the turns that are kept",
        "trim": "the strategy is summarize",
        "extract": "the strategy is summarize",
        "summarize": "",
    }
    prices = {option.way: option for option in summarised.options}
    assert prices["trim"].tokens_after < prices["summarize"].tokens_after
    assert prices["extract"].worth - prices["summarize"].worth == prices["summarize"].call_tokens
    assert summarised.why == f"past the trigger at {ALLOWED} tokens; of the ways that are open it is worth most"
    assert whys(refused(turns(1, 4, 2000)))["summarize"] == "no turn may be replaced"


def test_a_price_that_is_not_earned_back_is_explained() -> None:
    plan = made([*turns(1, 1), *turns(2, 2, 900), *turns(3, 5)], overhead_tokens=ALLOWED - 2000)
    assert next(option for option in plan.options if option.eligible).worth < 0
    assert plan.why.endswith("It costs more prefill than it is expected to save, and to keep all is not open")


def test_where_what_is_kept_is_past_the_trigger_half_of_the_room_is_freed_at_once() -> None:
    """A document of 4,800 tokens is the first turn: summaries come every few turns, not at each."""
    path = [message("t1", 4800)]
    late = [at for at in range(2, 40) if isinstance(planned([*path, *turns(2, at)]), Plan)]
    waits = refused([*path, *turns(2, late[0] - 1)])
    assert waits.reason == "floor"
    assert whys(waits)["summarize"].endswith(f"{waits.tokens_before - waits.tokens_after}")
    plan = made([*path, *turns(2, late[0])])
    assert ALLOWED < plan.tokens_after < WINDOW - 512
    assert plan.tokens_before - plan.tokens_after >= (WINDOW - 512 - plan.tokens_after) // 2
    assert plan.cuts == ()
    assert 3 <= len(plan.ranges[0].turn_ids) <= 6


@pytest.mark.parametrize(
    ("tokens", "per_turn", "budget"),
    [(300, 40, 640), (70, 40, 560), (300, 5000, 1600), (300, 0, LEAST_SEGMENT), (300, -7, LEAST_SEGMENT)],
)
def test_a_summary_has_so_many_tokens_a_turn_and_half_of_it_at_most(tokens: int, per_turn: int, budget: int) -> None:
    plan = made(turns(1, 20, tokens), policy=Policy(tokens_per_turn=per_turn), urgency="asked")
    assert plan.ranges == (Range(ids(2, 17), 16 * tokens, budget),)


def test_a_summary_that_its_frame_would_outweigh_is_not_made() -> None:
    pinned = turns(3, 3, pinned=True)
    plan = made([*turns(1, 1), *turns(2, 2, 70), *pinned, *turns(4, 25)])
    assert [each.turn_ids[0] for each in plan.ranges] == ["t4"]


def bound(turn: SizedTurn) -> SizedTurn:
    """It calls tools that the next turn answers."""
    return replace(turn, open_calls=True)


@pytest.mark.parametrize(
    ("target", "kinds"),
    [
        (5000, ["image"]),
        (3700, ["image", "reasoning"]),
        (3200, ["image", "reasoning", "tool_output"]),
        (2500, ["image", "reasoning", "tool_output", "oversized"]),
    ],
)
def test_images_go_first_then_reasoning_then_tool_outputs_then_long_messages(target: int, kinds: list[str]) -> None:
    chain = [
        message("t2", 1500),
        message("t3", 500, "tool_output"),
        message("t4", 300, "reasoning"),
        message("t5", 2600, "image", beside=100),
    ]
    plan = made([*turns(1, 1), *map(bound, chain), *turns(6, 8)], policy=Policy(target_ratio=target / WINDOW))
    assert (plan.way, plan.ranges) == ("elide", ()), "turns bound to the last ones are not replaced"
    assert [cut.kind for cut in plan.cuts] == kinds
    assert plan.tokens_after <= target


def test_a_cut_leaves_a_marker_and_what_stands_beside_it() -> None:
    def budget(turn: SizedTurn) -> int:
        return made([*turns(1, 1), bound(turn), *turns(3, 5)]).cuts[0].budget_tokens

    assert budget(message("t2", 6000, "image", beside=100)) == 100 + MARKER_TOKENS
    assert budget(message("t2", 6000, "reasoning")) == 0
    assert budget(message("t2", 6000, "tool_output")) == MASK_TOKENS
    assert budget(message("t2", 4000, "oversized")) == 1000, "a quarter"
    assert budget(message("t2", 40000, "oversized")) == WINDOW // 8, "not oversized any more"


def test_what_is_short_is_not_cut() -> None:
    short = [
        message("t2", 63, "tool_output"),
        message("t3", 12, "image"),
        message("t4", 1024),
        message("t5", 0, "reasoning"),
    ]
    assert refused([*turns(1, 1), *map(bound, short), *turns(6, 8)], overhead_tokens=5000).reason == "nothing"


def test_one_item_is_cut_once() -> None:
    parts = (SizedPart("input", 0, 3000, "image"), SizedPart("input", 0, 3000, "oversized"))
    plan = made([*turns(1, 1), SizedTurn("t2", 6000, open_calls=True, parts=parts), *turns(3, 5)])
    assert [cut.kind for cut in plan.cuts] == ["image"]


def worth(plan: Plan) -> dict[str, float]:
    return {option.way: option.worth for option in plan.options if option.eligible}


def test_what_is_cheaper_is_chosen() -> None:
    """A late cut breaks little of the prefix and needs no call. With as much to win early, a summary wins more."""
    giant = message("t11", 3400, "tool_output")
    late = made([*turns(1, 10, 200), giant, *turns(12, 14, 150)])
    early = made([*turns(1, 1), message("t2", 2500, "tool_output"), *turns(3, 14)])
    assert (late.way, late.first_changed) == ("elide", 300 + 10 * 200)
    assert (early.way, early.first_changed) == ("summarize", 300 + 300)
    assert worth(late)["elide"] > worth(late)["summarize"]
    assert worth(early)["summarize"] > worth(early)["elide"]
    assert [option.way for option in late.options] == ["keep", "elide", "summarize", "trim", "extract"]


def test_without_a_model_there_is_no_call_to_pay() -> None:
    path = turns(1, 18)
    for strategy in ("extract", "trim"):
        plan = made(path, policy=Policy(strategy=strategy))
        assert plan.way == strategy
        assert next(option for option in plan.options if option.eligible).call_tokens == 0
    assert next(option for option in made(path).options if option.eligible).call_tokens == 160 + 6 * 400


def test_what_is_left_out_leaves_a_marker() -> None:
    plan = made(turns(1, 18), policy=Policy(strategy="trim"))
    assert plan.ranges == (Range(ids(2, 10), 2700, MARKER_TOKENS),)


def test_calls_go_with_their_outputs() -> None:
    chain = [bound(turn) for turn in turns(2, 3)]
    near = Policy(target_ratio=0.7)
    assert made(turns(1, 18), overhead_tokens=200, policy=near).ranges[0].turn_ids == ids(2, 3)
    whole = made([*turns(1, 1), *chain, *turns(4, 18)], overhead_tokens=200, policy=near)
    assert whole.ranges[0].turn_ids == ids(2, 4)
    pinned = made([*turns(1, 1), *chain, *turns(4, 4, pinned=True), *turns(5, 20)])
    assert pinned.ranges[0].turn_ids[0] == "t5"


def test_a_pin_in_a_tool_group_takes_the_whole_group_out_of_its_segment() -> None:
    path = [*turns(1, 1), *turns(2, 2, open_calls=True), *turns(3, 3, pinned=True), *turns(4, 8)]
    seen = refused(path, (segment("s", 100, "t2", "t3", "t4"),))
    assert seen.tokens_before == 300 + 7 * 300 + FRAME_TOKENS + 100


def test_kept_turns_are_cut_only_where_nothing_else_is_enough() -> None:
    last = [*turns(10, 11), message("t12", 2500)]
    enough = made([*turns(1, 9), *last])
    assert (enough.ranges[0].turn_ids[0], enough.cuts) == ("t2", ())
    fits = made([*turns(1, 3), *turns(4, 5), message("t6", 6000)])
    assert (fits.ranges, fits.cuts) == ((Range(ids(2, 3), 600, 80),), ()), "7,328 tokens fit"
    for urgency in ("auto", "hard", "asked"):
        alone = made([*turns(1, 3), *turns(4, 5), message("t6", 6400)], urgency=urgency)
        assert alone.ranges == (Range(ids(2, 3), 600, 80),)
        assert [(cut.turn_id, cut.budget_tokens) for cut in alone.cuts] == [("t6", 1024)]
    assert [(option.way, option.eligible) for option in alone.options[:3]] == [
        ("keep", False),
        ("summarize", True),
        ("summarize", True),
    ]


@pytest.mark.parametrize("urgency", ["auto", "asked", "hard"])
@pytest.mark.parametrize("path", [[message("t1", 4761)], [*turns(1, 2), message("t3", 4761)]])
def test_a_pasted_document_stays_whole_while_it_fits(path: list[SizedTurn], urgency: Any) -> None:
    """Right after its answer the prompt is past the trigger, and the next question is about the document's middle."""
    assert sum(turn.tokens for turn in path) + 300 > 0.55 * WINDOW
    reasons = {"auto": "nothing", "asked": "nothing", "hard": "below_trigger"}
    assert refused(path, overhead_tokens=700, urgency=urgency).reason == reasons[urgency]


def test_a_message_longer_than_the_window_is_cut_to_fit() -> None:
    assert made([*turns(1, 3), message("t4", 10 * WINDOW)], urgency="hard").tokens_after <= WINDOW


def test_a_prompt_that_must_fit_may_lose_turns_without_a_summary() -> None:
    path = turns(1, 40, 100)
    summaries = 36 * 40
    overhead = WINDOW - 512 - 400 - FRAME_TOKENS - summaries + 1
    plan = made(path, overhead_tokens=overhead, urgency="hard")
    assert (plan.way, plan.summary_budget) == ("trim", MARKER_TOKENS)
    assert [(option.way, option.eligible) for option in plan.options] == [
        ("keep", False),
        ("summarize", False),
        ("trim", True),
        ("elide", False),
        ("extract", False),
    ]
    assert made(path, overhead_tokens=overhead - 1, urgency="hard").way == "summarize"


def test_a_prompt_that_must_fit_leaves_the_least_an_answer_needs() -> None:
    path = turns(1, 4, 1000)
    assert refused(path, overhead_tokens=WINDOW - 4512, reserve_tokens=2048, urgency="hard").reason == "below_trigger"
    hard = refused(path, overhead_tokens=WINDOW - 4511, reserve_tokens=2048, urgency="hard")
    assert (hard.reason, hard.allowed_tokens) == ("nothing", WINDOW - 512)


def test_off_lets_turns_go_only_where_the_prompt_must_fit() -> None:
    assert made(turns(1, 40), policy=Policy(strategy="off"), urgency="hard").way == "trim"


def test_as_far_as_the_policy_lets_and_no_further() -> None:
    path = turns(1, 8)
    plan = made(path, urgency="asked")
    assert plan.ranges == (Range(ids(2, 5), 1200, 160),)
    again = refused(path, (segment("s", 160, *ids(2, 5)),), urgency="asked")
    assert again.reason == "nothing"
    assert refused(turns(1, 5), urgency="asked").reason == "gain"


def test_what_is_asked_for_is_not_weighed_against_a_gentler_way() -> None:
    path = [*turns(1, 10, 200), message("t11", 3400, "tool_output"), *turns(12, 14, 150)]
    assert made(path).way == "elide"
    asked = made(path, urgency="asked")
    assert [option.way for option in asked.options if option.eligible] == ["summarize"]
    assert whys(asked)["elide"] == "it was asked to compact as far as the policy lets"
    assert asked.ranges[0].turn_ids == ids(2, 11)


@pytest.mark.parametrize("keep_last", [1, 0, -3])
def test_the_last_turn_is_kept_whatever_is_asked(keep_last: int) -> None:
    plan = made(turns(1, 12), policy=Policy(keep_first=-1, keep_last=keep_last), urgency="asked")
    assert plan.ranges[0].turn_ids == ids(1, 11)


def test_a_target_over_the_trigger_does_no_harm() -> None:
    plan = made(turns(1, 18), policy=Policy(target_ratio=0.95))
    assert plan.tokens_after <= ALLOWED


def test_segments_of_another_path_count_for_nothing() -> None:
    path = turns(1, 18)
    assert made(path, (segment("s", 5000, "t2", "elsewhere"),)) == made(path)


def test_an_empty_path_has_no_plan() -> None:
    assert refused([], overhead_tokens=9000).reason == "nothing"
    assert refused([]).reason == "below_trigger"


def test_a_plan_shows_what_it_does_and_why() -> None:
    plan = made([*turns(1, 3), message("t4", 700), message("t5", 6000, "image"), *turns(6, 30)])
    shown = orjson.loads(orjson.dumps(plan.as_json()))
    assert shown["ranges"] == [
        {"turn_ids": list(each.turn_ids), "budget_tokens": each.budget_tokens} for each in plan.ranges
    ]
    assert [option["way"] for option in shown["options"]] == [option.way for option in plan.options]
    assert all(option["why"] for option in shown["options"] if not option["eligible"])


def test_a_new_summary_gets_no_more_than_its_share_once_the_past_is_long() -> None:
    old = segment("s1", 500, *ids(2, 101))
    (new,) = made([*turns(1, 101), *turns(102, 120)], (old,)).ranges
    fair = FRESH * MERGE_SHARE * share(0.4, WINDOW) / (100 + len(new.turn_ids))
    assert new.budget_tokens == int(fair) * len(new.turn_ids)
    assert int(fair) < Policy().tokens_per_turn
