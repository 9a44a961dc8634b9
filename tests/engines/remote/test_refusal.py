# ruff: noqa: E501 - the wordings are quoted whole, one a line
"""The overflow classifier: every wording seen in the field, its numbers, and what must not be taken for it."""

from __future__ import annotations

import time

import orjson
import pytest

from engines.contract import (
    ContextOverflow,
    EngineBroken,
    EngineError,
    EngineOverloaded,
    EngineTimeout,
    EngineUnreachable,
    RequestRefused,
    Unsupported,
)
from engines.remote.refusal import engine_error, read_complaint


def classify(status: int, body: object) -> EngineError:
    raw = body.encode() if isinstance(body, str) else orjson.dumps(body)
    return engine_error(status, read_complaint(raw), replica="r", retry_after_s=2.0)


def error(message: str, **more: object) -> dict[str, object]:
    return {"error": {"message": message, **more}}


OVERFLOWS = [
    ("vllm, total", 400, error("This model's maximum context length is 16384 tokens. However, you requested 8192 output tokens and your prompt contains at least 8193 input tokens, for a total of at least 16385 tokens. Please reduce the length.", type="BadRequestError", code=400), 16384, 16385),
    ("vllm, max_tokens", 400, error("'max_tokens' or 'max_completion_tokens' is too large: 5000. This model's maximum context length is 4096 tokens and your request has 20 input tokens (5000 > 4096 - 20).", code=400), 4096, 5020),
    ("vllm, max_tokens over the window", 400, error("max_tokens=2000 cannot be greater than max_model_len=1024. Please request fewer output tokens. (parameter=max_tokens, value=2000)", type="BadRequestError", param="max_tokens", code=400), 1024, 2000),
    ("vllm before 0.11", 400, {"object": "error", "message": "This model's maximum context length is 4096 tokens. However, you requested 4200 tokens (4000 in the messages, 200 in the completion). Please reduce the length of the messages or completion.", "type": "BadRequestError", "param": None, "code": 400}, 4096, 4200),
    ("openai", 400, error("This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.", type="invalid_request_error", param="messages", code="context_length_exceeded"), 8192, 9000),
    ("openai, code alone", 400, error("Your input exceeds the context window of this model.", code="context_length_exceeded"), None, None),
    ("sglang", 400, error("Requested token count exceeds the model's maximum context length of 202752 tokens. You requested a total of 202941 tokens: 170941 tokens from the input messages and 32000 tokens for the completion."), 202752, 202941),
    ("sglang, input", 400, error("The input (5000 tokens) is longer than the model's context length (4096 tokens)."), 4096, 5000),
    ("llama.cpp", 400, error("the request exceeds the available context size. try increasing the context size or enable context shift", code=400, type="exceed_context_size_error", n_prompt_tokens=14429, n_ctx=8192), 8192, 14429),
    ("llama.cpp in a 500", 500, error("request (1407 tokens) exceeds the available context size (256 tokens), try increasing it", code=500, type="exceed_context_size_error"), 256, 1407),
    ("inside a 200 stream", 200, error("the request exceeds the available context size", code=400, type="exceed_context_size_error", n_prompt_tokens=300, n_ctx=256), 256, 300),
    ("poolside", 400, error("Input length 131393 exceeds the maximum allowed input length of 131040 tokens.", code="400"), 131040, 131393),
    ("in brackets", 400, error("Input length (265330) exceeds model's maximum context length (262144)."), 262144, 265330),
    ("anthropic-like", 400, error("prompt is too long: 210000 tokens > 200000 maximum"), 200000, 210000),
    ("sum", 400, error("input length and max_tokens exceed context limit: 170636 + 34048 > 200000, decrease input length"), 200000, 204684),
    ("google", 400, error("Unable to submit request because the input token count is 32825 but model only supports up to 32768."), 32768, 32825),
    ("google, brackets", 400, error("The input token count (1,200,000) exceeds the maximum number of tokens allowed (1,048,576)."), 1048576, 1200000),
    ("text-generation-inference", 422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 `inputs` tokens and 200 `max_new_tokens`", "error_type": "validation"}, 4096, 4200),
    ("mistral", 400, {"object": "error", "message": "Prompt contains 235396 tokens and 0 draft tokens, too large for model with 131072 maximum context length"}, 131072, 235396),
    ("lm studio", 400, error("Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with context length of only 4096 tokens"), 4096, 5000),
    ("a request over a token quota, 429", 429, error("Request too large for model `m` on tokens per minute (TPM): Limit 6000, Requested 7342, please reduce your message size", type="tokens", code="rate_limit_exceeded"), 6000, 7342),
    ("the same, 413", 413, error("Request too large on tokens per minute (TPM): Limit 12000, Requested 15318"), 12000, 15318),
    ("our own", 400, error("too long", code="context_length_exceeded", limit=4096, requested=5000), 4096, 5000),
    ("plain text", 400, "Prompt too long: 5152 tokens exceeds max_seq_len 2048 (leave room for output tokens)", 2048, 5152),
]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "body", "limit", "requested"), [o[1:] for o in OVERFLOWS], ids=[o[0] for o in OVERFLOWS]
)
def test_a_prompt_that_is_too_long_is_an_overflow_with_its_numbers(
    status: int, body: object, limit: int | None, requested: int | None
) -> None:
    found = classify(status, body)
    assert isinstance(found, ContextOverflow)
    assert (found.limit, found.requested) == (limit, requested)


OTHERS = [
    ("rate limit", 429, error("Rate limit reached on tokens per minute (TPM): Limit 30000, Used 29000, Requested 2000."), EngineOverloaded),
    ("throttled", 429, error("Too many tokens, please wait before trying again. Throttling: maximum context length"), EngineOverloaded),
    ("queue full", 503, error("The server is overloaded"), EngineOverloaded),
    ("our overload", 503, error("queue full", code="overloaded"), EngineOverloaded),
    ("loading", 503, error("loading the model", code="loading"), EngineUnreachable),
    ("bad value", 400, error("temperature must be non-negative", param="temperature", code=400), RequestRefused),
    ("unprocessable", 422, {"detail": [{"loc": ["body", "top_k"], "msg": "Field required"}]}, RequestRefused),
    ("unsupported", 400, error("no", code="unsupported_parameter", param="tools"), Unsupported),
    ("no such model", 404, error("The model `x` does not exist.", type="NotFoundError", code=404), RequestRefused),
    ("no such path", 404, {"detail": "Not Found"}, EngineBroken),
    ("credential", 401, error("Invalid API key"), EngineBroken),
    ("server error", 500, "Internal Server Error", EngineBroken),
    ("server error in a stream", 200, error("EngineCore died", type="InternalServerError", code=500), EngineBroken),
    ("proxy", 502, "<html>bad gateway</html>", EngineUnreachable),
    ("proxy timeout", 504, "", EngineTimeout),
    ("redirect", 307, "", EngineBroken),
    ("not UTF-8", 500, b"\xff\xfe".decode("latin-1"), EngineBroken),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "kind"), [o[1:] for o in OTHERS], ids=[o[0] for o in OTHERS])
def test_other_errors_keep_their_own_kind(status: int, body: object, kind: type[EngineError]) -> None:
    assert type(classify(status, body)) is kind


def test_a_refused_request_names_its_parameter_and_an_overload_its_wait() -> None:
    refused = classify(400, error("bad", param="top_p", code="invalid_value"))
    assert isinstance(refused, RequestRefused)
    assert (refused.code, refused.param, refused.retryable) == ("invalid_value", "top_p", False)
    missing = classify(404, error("The model `x` does not exist."))
    assert isinstance(missing, RequestRefused)
    assert missing.code == "model_not_found"
    overloaded = classify(429, error("slow down"))
    assert isinstance(overloaded, EngineOverloaded)
    assert overloaded.retry_after_s == 2.0


def test_a_long_complaint_is_cut() -> None:
    assert len(str(classify(400, error("x" * 10_000)))) < 600


@pytest.mark.parametrize("number", ["9" * 5000, "²", "0", "-7"])
def test_a_number_that_is_none_is_not_told(number: str) -> None:
    told = classify(400, error(f"This model's maximum context length is {number} tokens", limit=number, n_ctx=-5))
    assert isinstance(told, ContextOverflow)
    assert told.limit is None


def test_a_complaint_of_megabytes_is_not_read_to_its_end() -> None:
    began = time.perf_counter()
    for words in ("maximum context length is 1 ", "limit 1 token ", "too large: 1 "):
        assert classify(400, error(words * 100_000)) is not None
    assert time.perf_counter() - began < 1.0
