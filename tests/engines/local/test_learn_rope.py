"""Which models' keys can be moved to another position is learnt from the model; the others say why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engines.local.model import adopt
from tests.engines.local.test_families import FAMILIES, PLAIN_HEADS, build
from tests.engines.local.test_shift import Talk, exactly, make_engine


@pytest.mark.parametrize(
    ("kind", "changes", "without", "pairs", "neighbours"),
    [
        (*FAMILIES["llama"], 8, False),
        ("cohere", {}, (), 8, True),
        ("glm4", {}, (), 4, True),
        ("gpt_neox", {}, PLAIN_HEADS, 2, False),
    ],
    ids=["halves", "neighbours", "neighbours of a part", "halves of a part"],
)
def test_frequencies_and_pairing_are_found(
    kind: str, changes: dict[str, Any], without: tuple[str, ...], pairs: int, neighbours: bool
) -> None:
    model = adopt(build(kind, changes, without), name=kind, decode=lambda ids: "")
    found = [(len(turn.inv_freq), turn.neighbours) for turn in model.rotations.values() if turn is not None]
    assert found == [(pairs, neighbours)] * 4


def test_a_layer_whose_keys_carry_no_position_is_told_apart() -> None:
    model = adopt(build(*FAMILIES["smollm3"]), name="smollm3", decode=lambda ids: "")
    assert [turn is None for turn in model.rotations.values()] == [False, False, False, True]


@pytest.mark.parametrize(
    ("kind", "changes", "without", "reason"),
    [
        ("mistral", {"sliding_window": 24}, (), "4 of 4 layers attend to a sliding window"),
        ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16}, (), "2 of 4 layers attend to a sliding window"),
        ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}, PLAIN_HEADS, "no RoPE"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            (),
            "several axes",
        ),
    ],
    ids=["sliding window", "some sliding windows", "learned positions", "mrope"],
)
def test_a_model_whose_keys_cannot_be_moved_says_why_and_answers_exactly(
    kind: str, changes: dict[str, Any], without: tuple[str, ...], reason: str
) -> None:
    model = adopt(build(kind, changes, without), name=kind, decode=lambda ids: "")
    assert reason in (model.no_shift or "")
    talk = Talk(make_engine(model))
    talk.run.run(talk.new())
    assert talk.shifted() == 0
    assert talk.run.ids["new"] == exactly(model, talk.prompt)


def test_keys_that_turn_in_no_known_way_are_not_moved() -> None:
    module = build("llama", {})
    own = module.model.rotary_emb

    def bent(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float().sqrt() * own.inv_freq
        both = torch.cat((angles, angles), -1)
        return both.cos(), both.sin()

    own.forward = bent
    assert "do not turn" in (adopt(module, name="bent", decode=lambda ids: "").no_shift or "")
