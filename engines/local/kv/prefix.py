"""The prefix index: which block of ids, after which path, lies in which page. Exact; knows no pool and no tensors.

A node is one full block of one path: key (uid of its parent, its token bytes). Uids are never used twice, so equal keys
mean equal paths: no hash is trusted. A node is apart from its page: evicting the page leaves the node while something
hangs on it (a later block that is still cached, or a sequence that runs), so those are found again when the page
is computed anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from engines.blocks import block_digest, root_digest
from engines.kv_log import Block, KvLog

NO_PAGE = -1


@dataclass(slots=True, eq=False)
class Node:
    """`digest` is the block's outside name. `holds` counts the sequences that may hang their next block on it."""

    uid: int
    parent: Node | None
    key: bytes
    digest: bytes
    page: int = NO_PAGE
    children: int = 0
    holds: int = 0


class PrefixIndex:
    """One tree a cache salt, all for one model (`model` names weights and tokenizer). `log` is told of each block that
    gets a page or loses it."""

    def __init__(self, model: str, log: KvLog | None = None) -> None:
        self._model = model
        self._log = log
        self._uids = count(1)
        self._roots: dict[str, Node] = {}
        self._nodes: dict[tuple[int, bytes], Node] = {}
        self._located: dict[int, Node] = {}  # by uid; only nodes with a page

    def __len__(self) -> int:
        return len(self._nodes)

    def new_uid(self) -> int:
        """A name for content that is no full block (the partial tail of a kept path)."""
        return next(self._uids)

    def root(self, salt: str) -> Node:
        node = self._roots.get(salt)
        if node is None:
            digest = root_digest(salt=salt, model=self._model)
            node = self._roots[salt] = Node(next(self._uids), None, salt.encode(), digest)
        return node

    def child(self, parent: Node, token_bytes: bytes) -> Node | None:
        return self._nodes.get((parent.uid, token_bytes))

    def located(self, uid: int) -> Node | None:
        """The node of that uid, if it has a page."""
        return self._located.get(uid)

    def insert(self, parent: Node, token_bytes: bytes) -> Node:
        """The node of that block after `parent`, made if need be."""
        node = self._nodes.get((parent.uid, token_bytes))
        if node is None:
            digest = block_digest(parent.digest, token_bytes)
            node = self._nodes[parent.uid, token_bytes] = Node(next(self._uids), parent, token_bytes, digest)
            parent.children += 1
        return node

    def locate(self, node: Node, page: int) -> None:
        node.page = page
        self._located[node.uid] = node
        if self._log is not None:
            parent = node.parent
            assert parent is not None, "a root has no page"
            at_root = parent.parent is None
            salt = parent.key.decode() if at_root else ""
            self._log.stored(Block(node.digest, None if at_root else parent.digest, node.key, salt))

    def drop(self, uid: int) -> None:
        """The page under that name is gone. Unknown uids (tails) are nothing to the index."""
        node = self._located.pop(uid, None)
        if node is not None:
            node.page = NO_PAGE
            if self._log is not None:
                self._log.removed(node.digest)
            self._prune(node)

    def is_leaf(self, uid: int) -> bool:
        """Nothing hangs on the block of that uid. A tail, which is no node, has nothing."""
        node = self._located.get(uid)
        return node is None or not node.children

    def above(self, uid: int) -> int:
        """Page of the nearest block before that of `uid` that has one, 0 if none."""
        node = self._located.get(uid)
        node = node.parent if node is not None else None
        while node is not None and node.page == NO_PAGE:
            node = node.parent
        return node.page if node is not None else 0

    def hold(self, node: Node) -> Node:
        node.holds += 1
        return node

    def unhold(self, node: Node) -> None:
        node.holds -= 1
        assert node.holds >= 0, "a node was let go twice"
        self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.page == NO_PAGE and not node.children and not node.holds:
            if node.parent is None:
                self._roots.pop(node.key.decode(), None)
                return
            del self._nodes[node.parent.uid, node.key]
            node.parent.children -= 1
            node = node.parent

    def check(self, owner_of: dict[int, int]) -> None:
        """The tree is whole, and `owner_of` (page -> uid, from the pool) agrees about every page it claims."""
        children: dict[int, int] = {}
        for (parent_uid, key), node in self._nodes.items():
            assert node.parent is not None
            assert (node.parent.uid, node.key) == (parent_uid, key)
            children[parent_uid] = children.get(parent_uid, 0) + 1
            assert node.page != NO_PAGE or node.children or node.holds, "a bare node was not pruned"
            assert (node.page != NO_PAGE) == (node.uid in self._located)
            if node.page != NO_PAGE:
                assert owner_of.get(node.page) == node.uid, f"page {node.page} does not hold node {node.uid}"
        for node in (*self._nodes.values(), *self._roots.values()):
            assert node.children == children.get(node.uid, 0), "children miscounted"
