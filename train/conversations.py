"""Prepared conversations as training reads them: ids and loss mask by number, lengths and a content hash at once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.prepare import load


class Conversations:
    """A prepared data set (columns ``input_ids`` and ``loss_mask``); rows stay on disk until asked for.

    Attributes:
        lengths: (N,) tokens of each conversation.
        answer_tokens: tokens under the loss mask, over all conversations.
        digest: hash of all ids and masks, which is what cached states of the target hang on.

    Raises:
        ValueError: there is no conversation, or none has a token to learn from.
    """

    def __init__(self, dataset: Any, where: str) -> None:
        self._dataset = dataset
        self._rows = dataset.with_format("numpy", columns=["input_ids", "loss_mask"])
        self.where = where
        lengths, answers, digest = [], 0, hashlib.sha256()
        for rows in self._rows.iter(batch_size=1024):
            for ids, mask in zip(rows["input_ids"], rows["loss_mask"], strict=True):
                if len(ids) != len(mask):
                    raise ValueError(f"{where}: a row has {len(ids)} ids but {len(mask)} loss marks; prepare it again")
                lengths.append(len(ids))
                answers += int(np.sum(mask))
                digest.update(np.asarray(ids, np.int64).tobytes())
                digest.update(np.asarray(mask, bool).tobytes())
                digest.update(b"|")
        if not answers:
            raise ValueError(
                f"{where}: {len(lengths)} conversations and no answer token among them: nothing can be learned"
            )
        self.lengths = np.asarray(lengths, np.int64)
        self.answer_tokens = answers
        self.digest = digest.hexdigest()

    @classmethod
    def load(cls, folder: Path, split: str = "train") -> Conversations:
        """Read a folder made by ``headstart data prepare``."""
        return cls(load(folder, split), str(folder / split))

    def select(self, indices: list[int]) -> Conversations:
        """Some of them, as a set of their own."""
        return Conversations(self._dataset.select(indices), f"part of {self.where}")

    def __len__(self) -> int:
        return len(self.lengths)

    def row_id(self, index: int) -> str:
        """How preparing named the row: its file and line; its number where the data set names none."""
        return str(self._dataset[int(index)].get("id", f"{self.where} row {index}"))

    def ids(self, index: int) -> Tensor:
        """(T,) int64."""
        return torch.as_tensor(np.asarray(self._rows[int(index)]["input_ids"], np.int64))

    def loss_mask(self, index: int) -> Tensor:
        """(T,) bool, true for tokens of an answer and the token that ends it."""
        return torch.as_tensor(np.asarray(self._rows[int(index)]["loss_mask"], bool))

    def prompt(self, index: int) -> Tensor:
        """(n,) int64: all that stands before the first answer; empty if the answer stands first."""
        return self.ids(index)[: int(self.loss_mask(index).int().argmax())]

    def answer_counts(self, vocab_size: int) -> Tensor:
        """(V,) int64: how often each token occurs in answers; what a reduced draft vocabulary is chosen by."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for index in range(len(self)):
            counts += torch.bincount(self.ids(index)[self.loss_mask(index)], minlength=vocab_size)
        return counts
