"""Log-probabilities of prompt tokens: those of the model, whatever of the prompt was reused and however it was cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.contract import RequestRefused
from engines.local.intake import MAX_SCORED
from tests.engines.local.tiny import DIM, VOCAB, Answers, TinyModel, request, tiny_engine


def _plain(module: TinyModel, ids: list[int]) -> torch.Tensor:
    """[tokens, vocab], all at once."""
    q, k, v = module.parts(torch.tensor(ids), torch.arange(len(ids)))
    logits = (q @ k.T * DIM**-0.5).masked_fill(torch.ones(len(ids), len(ids)).triu(1) == 1, -torch.inf)
    return torch.log_softmax((torch.softmax(logits, -1) @ v + v) @ module.out, -1)


@pytest.mark.parametrize("start", [0, 7, 40, 59])
def test_scores_are_the_models_and_what_is_scored_is_never_reused(start: int) -> None:
    module = TinyModel()
    answers = Answers(tiny_engine(module=module, max_batch_tokens=32))
    ids = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    wanted = _plain(module, ids)[start:]
    for name in ("cold", "warm"):
        answers.run(
            replace(request(name, ids, 1, session="s"), score_from=start), request(name + " mate", ids[::-1], 3)
        )
        got = torch.frombuffer(bytearray(answers.last[name].scores), dtype=torch.float32).view(-1, VOCAB)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
        assert not answers.last[name + " mate"].scores
    assert answers.cached["warm"] == start


def test_scores_of_too_many_tokens_or_of_none_are_refused() -> None:
    engine = tiny_engine()
    for start in (0, 300):
        with pytest.raises(RequestRefused, match=f"last {MAX_SCORED} of 300"):
            engine.submit(replace(request("r", [1] * 300, 1), score_from=start))
