"""A smaller encoder-decoder as a drafter for an encoder-decoder target: both encoders read the same prompt.

What follows is what any draft model does (:class:`infer.drafters.draft_model.DraftModelDrafter`), with the decoder's
text: the two must have the same vocabulary and the same start token. The set-up of 2211.17192.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from heads.base import DraftHeads
from heads.target import Target
from infer.drafters.draft_model import LOOKAHEAD, DraftModelDrafter
from infer.seq2seq import Seq2SeqTarget


class Seq2SeqDrafter(DraftModelDrafter):
    """Drafts chains with another encoder-decoder.

    Args:
        model: a sequence-to-sequence model of transformers, a :class:`infer.seq2seq.Seq2SeqTarget` of it, or its
            folder or Hub id. It is put into eval mode.
        lookahead: how deep it drafts when the caller names no budget.

    Raises:
        ValueError: it is no encoder-decoder, or keeps a state that cannot be rolled back.
    """

    model: Seq2SeqTarget

    def __init__(self, model: PreTrainedModel | Target | str | Path, *, lookahead: int = LOOKAHEAD) -> None:
        if isinstance(model, str | Path):
            model = Seq2SeqTarget.load(str(model), dtype="auto")
        if isinstance(model, Target) and not isinstance(model, Seq2SeqTarget):
            raise ValueError(f"{model.name} is no encoder-decoder: it cannot draft for one")
        super().__init__(model if isinstance(model, Seq2SeqTarget) else Seq2SeqTarget(model), lookahead=lookahead)

    @classmethod
    def from_spec(cls, argument: str, heads: DraftHeads | None, target: Target) -> Seq2SeqDrafter:
        """The drafter that ``model:ARGUMENT`` names where the target is an encoder-decoder.

        Raises:
            ValueError: nothing is named, or its vocabulary is not the target's.
            OSError: there is no such model.
        """
        if not argument:
            raise ValueError('draft="model:" names no model: write "model:FOLDER" or "model:ORG/NAME"')
        drafter = cls(Seq2SeqTarget.load(argument, dtype="auto", device=target.device))
        drafter._meet(target)
        return drafter

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """Read the target's prompt with the own encoder, then the decoder's text so far.

        Raises:
            ValueError: the target is no encoder-decoder, or has another vocabulary.
        """
        if not isinstance(target, Seq2SeqTarget) or target.source is None:
            raise ValueError(f"{self.model.name} is an encoder-decoder: it drafts for encoder-decoders only")
        with self._clock.running():
            self.model = self.model.read(target.source)
        super().begin(target, ids, taps)
