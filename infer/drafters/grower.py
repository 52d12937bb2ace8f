"""How a decoder with a cache grows a draft: one forward pass per depth, each node seeing its own ancestors.

Shared by draft models and by the target's own layers. The cache holds the text up to the root; drafted nodes are
appended behind it in the order in which they are asked for::

      cache: [ text … root | node a, node b, node c … ]      a node sees the text, its ancestors and itself
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# (ids, positions, mask) → logits (n, Vd) of what follows each: runs n nodes, their entries appended to the cache
Step = Callable[[list[int], list[int], Tensor | None], Tensor]


class DecoderGrower:
    """A :class:`heads.grow.Grower` for one draft.

    Args:
        root: logits (Vd,) of the token after the root.
        length: entries of the cache, the root's included; the root stands at position ``length - 1``.
        step: runs nodes of one depth; a mask of None shows a row everything before it.
    """

    def __init__(self, root: Tensor, length: int, step: Step) -> None:
        self.root, self.length, self.step = root, length, step
        self.entries: list[tuple[int, int]] = []  # node of the parent (-1: the root) and token, in the cache's order
        self._of: dict[int, int] = {}  # node → its entry
        self._seen: dict[int, list[int]] = {-1: []}  # node → entries of its ancestors and its own

    def first(self) -> Tensor:
        """Logits (Vd,) of the token after the root."""
        return self.root

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits (len(nodes), Vd): one pass over nodes of one depth."""
        drafted, n = len(self.entries), len(nodes)
        for row, node in enumerate(nodes):
            self._of[node] = drafted + row
            self._seen[node] = [*self._seen[parents[node]], drafted + row]
            self.entries.append((parents[node], tokens[node]))
        depth = len(self._seen[nodes[0]])
        return self.step([tokens[node] for node in nodes], [self.length - 1 + depth] * n, self._mask(nodes, drafted))

    def _mask(self, nodes: Sequence[int], drafted: int) -> Tensor | None:
        """Bool (1, 1, n, kv); None for a chain, which sees all there is."""
        if len(nodes) == 1 and len(self._seen[nodes[0]]) == drafted + 1:
            return None
        mask = torch.zeros(len(nodes), self.length + drafted + len(nodes), dtype=torch.bool)
        mask[:, : self.length] = True
        for row, node in enumerate(nodes):
            mask[row, [self.length + entry for entry in self._seen[node]]] = True
        return mask[None, None]

    def kept(self, accepted: Sequence[int]) -> list[int]:
        """Entries behind the root that hold a beginning of ``accepted`` tokens, in its order."""
        of_entry = {entry: node for node, entry in self._of.items()}
        by_place = {(parent, token): entry for entry, (parent, token) in enumerate(self.entries)}
        path: list[int] = []
        node = -1
        for token in accepted:
            entry = by_place.get((node, token))
            if entry is None:
                break
            path.append(entry)
            node = of_entry[entry]
        return path


def causal(n: int, before: int) -> Tensor:
    """Bool (1, 1, n, before + n): a block of n tokens behind ``before`` others, each seeing what stands before it."""
    return torch.ones(n, before + n, dtype=torch.bool).tril(before)[None, None]
