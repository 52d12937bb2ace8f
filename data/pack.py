"""Prepared sequences → blocks of one length, several documents in each, nothing of one known to another.

A block of 10 with documents of 4 and 6 tokens, and where the head that looks k tokens past the next has a target:

    documents   1 1 1 1 2 2 2 2 2 2     attention only within the same number
    positions   0 1 2 3 0 1 2 3 4 5     start again
    k = 1       x x . . x x x x . .     position p has the target p + 1 + k, if that is of the same document
    k = 2       x . . . x x x . . .
    k = 3       . . . . x x . . . .

Padding has the document number 0. What is padding is never read off a token id: many tokenizers pad with the end of
a turn, which is learned.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """One packed block; all tensors (T,).

    Attributes:
        ids: token ids, int64.
        loss_mask: bool; true for supervised tokens.
        documents: int64; 1, 2, … for the documents in it, 0 for padding.
        positions: int64; each document's own, from 0.
    """

    ids: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor

    def targets(self, ahead: int) -> tuple[Tensor, Tensor]:
        """What stands ``ahead`` tokens further on, and whether it is a target; ids (T,) int64 and valid (T,) bool.

        The target's own prediction has ``ahead`` 1; the head that looks k tokens past it has 1 + k. It is valid where
        both ends are in the same document and the token is supervised; elsewhere the id is 0.

        Raises:
            ValueError: ``ahead`` is below 1.
        """
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}, it must be 1 or more: a token is no target for itself")
        ids, valid = torch.zeros_like(self.ids), torch.zeros_like(self.loss_mask)
        here, there = self.documents[:-ahead], self.documents[ahead:]
        valid[:-ahead] = (here == there) & (here > 0) & self.loss_mask[ahead:]
        ids[:-ahead] = torch.where(valid[:-ahead], self.ids[ahead:], 0)
        return ids, valid


def attention(documents: Tensor) -> Tensor:
    """Who reads whom: documents (B, T) → bool (B, 1, T, T), true where the row's token may read the column's.

    Only earlier tokens of the same document, and itself. Padding reads itself too, so that no row is empty (a softmax
    over nothing is NaN); nothing reads padding.
    """
    length = documents.shape[-1]
    same = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=documents.device)
    return ((same & causal & (documents > 0)[:, :, None]) | itself)[:, None]


def plan(lengths: Sequence[int], block: int) -> list[list[int]]:
    """Which documents share a block: places in ``lengths``, ascending within a block; every document stands in one.

    The longest first, each into the fullest block that still takes it (best fit, decreasing); blocks come in the
    order of their first document, so that the plan follows from the lengths alone.

    Raises:
        ValueError: a document is longer than a block, or empty.
    """
    rooms: dict[int, list[list[int]]] = {}  # free tokens → blocks with that much room
    sizes: list[int] = []  # the keys of rooms, ascending
    plans: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[place]
        if not 0 < length <= block:
            raise ValueError(f"document {place} has {length} tokens, a block takes 1 to {block}: prepare it shorter")
        at = bisect_left(sizes, length)
        chosen: list[int]
        if at == len(sizes):
            room, chosen = block, []
            plans.append(chosen)
        else:
            room = sizes[at]
            chosen = rooms[room].pop()
            if not rooms[room]:
                del rooms[room], sizes[at]
        chosen.append(place)
        if room - length not in rooms:
            insort(sizes, room - length)
        rooms.setdefault(room - length, []).append(chosen)
    return sorted(sorted(places) for places in plans)


def pack(rows: Sequence[tuple[Sequence[int], Sequence[bool]]], block: int, pad_id: int = 0) -> Iterator[Block]:
    """Pack sequences into blocks.

    Args:
        rows: ids and loss mask of each; the columns ``input_ids`` and ``loss_mask`` of :func:`data.prepare.load`.
        block: tokens of a block.
        pad_id: fills the end of a block; it may be a token that is learned elsewhere.

    Raises:
        ValueError: see :func:`plan`, or a row's ids and mask differ in length.
    """
    for place, (ids, mask) in enumerate(rows):
        if len(ids) != len(mask):
            raise ValueError(f"document {place} has {len(ids)} ids but {len(mask)} loss marks: prepare it again")
    for places in plan([len(ids) for ids, _ in rows], block):
        made = Block(
            torch.full((block,), pad_id),
            torch.zeros(block, dtype=torch.bool),
            torch.zeros(block, dtype=torch.int64),
            torch.zeros(block, dtype=torch.int64),
        )
        at = 0
        for number, place in enumerate(places, 1):
            ids, mask = rows[place]
            part = slice(at, at + len(ids))
            made.ids[part] = torch.as_tensor(ids)
            made.loss_mask[part] = torch.as_tensor(mask)
            made.documents[part] = number
            made.positions[part] = torch.arange(len(ids))
            at += len(ids)
        yield made
