"""A prompt as placement sees it, made from the prompt that was built and from where the session's path was left."""

from __future__ import annotations

from gateway.fleet.chain import Chain, extend, root
from gateway.fleet.outlook import Path, path_of
from gateway.sessions.history import History
from gateway.sessions.prompt import ID_BYTES, BuiltPrompt


def standing_path(history: History) -> Path:
    """Of the session, before its next prompt is made."""
    tokens, chain = history.used_tokens, history.chain
    return Path(tokens, tokens, chain) if chain is not None else Path(tokens, tokens)


async def prompt_path(built: BuiltPrompt, history: History, *, salt: str, model: str) -> tuple[Path, Chain | None]:
    """The path of the whole prompt, and where what the session keeps of it ends (None: that is not known).

    Only the new ids are hashed where the prompt goes on from a path whose end is known.
    """
    before, chain = history.head.path_tokens, history.chain
    goes_on = chain is not None and 0 < before == built.base_tokens == chain.num_tokens
    if goes_on and chain is not None:
        new = built.ids.delta if built.ids.base is not None else built.ids.delta[before * ID_BYTES :]
        path = path_of(chain, new)
    else:
        whole = built.ids.delta if built.ids.base is None else await built.ids.whole()
        path = path_of(root(salt=salt, model=model), whole, base_tokens=built.base_tokens)
    if built.kept_tokens == built.ids.num_tokens:
        return path, path.end
    return path, extend(path.base, built.kept_ids)[0] if goes_on else None
