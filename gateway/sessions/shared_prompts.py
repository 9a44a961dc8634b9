"""Which system prompts several sessions have begun with lately: worth keeping in a replica's cache before others.

Remembered in this gateway alone, and no more than `kept` of them; a digest of each, and of a few sessions' ids no more
than are needed. Knows no replica and no text.
"""

from __future__ import annotations

from collections import OrderedDict

SESSIONS = 3  # from so many on a system prompt is shared: two may be one user's second try


class SharedPrompts:
    def __init__(self, kept: int = 1024) -> None:
        self._kept = kept
        self._seen: OrderedDict[tuple[str, str], frozenset[str]] = OrderedDict()

    def shared(self, tenant_id: str, prompt: str, session: str) -> bool:
        """Note that this session begins with `prompt` (names model, template, tools and system prompt) -> whether
        several do."""
        key = tenant_id, prompt
        sessions = self._seen.get(key, frozenset())
        if len(sessions) < SESSIONS:
            sessions |= {session}
        self._seen[key] = sessions
        self._seen.move_to_end(key)
        if len(self._seen) > self._kept:
            self._seen.popitem(last=False)
        return len(sessions) >= SESSIONS

    def forget(self, session: str) -> None:
        """Keep nothing of a deleted session."""
        for key, sessions in [(key, sessions) for key, sessions in self._seen.items() if session in sessions]:
            self._seen[key] = sessions - {session}
