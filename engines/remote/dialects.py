"""What the chat endpoints of OpenAI-compatible servers honour, and the body to send them.

Most of them pass over fields they do not know. So a field goes only to a server that is known to honour it
(`DIALECTS`), and what was asked for beyond that is Unsupported, never dropped. No dialect recognised: OpenAI's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.contract import ChatPrompt, GenerateRequest, Unsupported
from engines.remote.chat import (
    ALL_SAMPLING,
    OPENAI_SAMPLING,
    chat_fields,
    chat_logprobs,
    response_format,
    sampling_fields,
)
from engines.remote.metrics import LLAMACPP, SGLANG, Names


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one server's chat endpoint honours, as documented. `explicit`: it has sampling defaults of its own."""

    kind: str
    sampling: frozenset[str]
    explicit: bool = False
    template_options: bool = False
    max_logprobs: int = 20
    renamed: Mapping[str, str] = field(default_factory=dict)
    metrics: Names | None = None


OPENAI = Dialect("openai", OPENAI_SAMPLING)
SGLANG_CHAT = Dialect("sglang", ALL_SAMPLING, explicit=True, template_options=True, metrics=SGLANG)
LLAMACPP_CHAT = Dialect(
    "llamacpp", ALL_SAMPLING - {"stop_token_ids"}, explicit=True, template_options=True,
    renamed={"repetition_penalty": "repeat_penalty"}, metrics=LLAMACPP,
)  # fmt: skip
LM_STUDIO = Dialect(
    "openai", (OPENAI_SAMPLING - {"logprobs"}) | {"top_k", "repetition_penalty"}, explicit=True, max_logprobs=0,
    renamed={"repetition_penalty": "repeat_penalty"},
)  # fmt: skip
OLLAMA = Dialect("openai", OPENAI_SAMPLING - {"logit_bias", "logprobs"}, explicit=True, max_logprobs=0)
DIALECTS: Mapping[str, Dialect] = {  # by `owned_by` of /v1/models
    "sglang": SGLANG_CHAT,
    "llamacpp": LLAMACPP_CHAT,
    "organization_owner": LM_STUDIO,
    "library": OLLAMA,
}


def recognise(cards: Iterable[Mapping[str, Any]]) -> Dialect:
    """The dialect of the server that lists these models."""
    return next((DIALECTS[owner] for card in cards if (owner := str(card.get("owned_by"))) in DIALECTS), OPENAI)


def chat_body(request: GenerateRequest, prompt: ChatPrompt, dialect: Dialect, *, replica: str) -> dict[str, Any]:
    """The request as the dialect has it, but for `max_tokens` and `stream_options`. Raises Unsupported."""
    sampling = request.sampling
    if sampling.logprobs is not None and sampling.logprobs > dialect.max_logprobs:
        message = f"{replica} gives at most {dialect.max_logprobs} logprobs"
        raise Unsupported(message, param="logprobs", replica=replica)
    body = {"model": request.model, "stream": True, **chat_fields(prompt), **chat_logprobs(sampling)}
    body |= sampling_fields(
        sampling, dialect.sampling, replica=replica, explicit=dialect.explicit, renamed=dialect.renamed
    )
    if prompt.template_options:
        if not dialect.template_options:
            message = f"{replica} takes no options for its template"
            raise Unsupported(message, param="chat_template_kwargs", replica=replica)
        body["chat_template_kwargs"] = dict(prompt.template_options)
    if sampling.grammar is not None:
        body["response_format"] = response_format(sampling.grammar, replica=replica)
    return body
