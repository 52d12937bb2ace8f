"""Encoder-decoder targets: the prompt is read once by the encoder, the decoder is what is drafted for.

The decoder's own keys and values lie in the cache that can forget (:class:`infer.cache.ForgettingCache`); those of
the cross-attention depend on the prompt alone and are computed in the first pass. Relative biases (T5) and learned
positions (BART) follow from the length of the cache, so after a rollback they are right by themselves, and drafts
are chains: two siblings of a tree would need one position at two places.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from heads import compat
from heads.forward import TargetOutput
from heads.identity import TargetIdentity
from heads.target import Target


@dataclass(frozen=True)
class Source:
    """What the encoder reads: ids (1, n) and their mask (1, n), padding as ``model.generate`` would see it."""

    ids: Tensor
    mask: Tensor


class Seq2SeqTarget(Target):
    """A frozen encoder-decoder (T5, BART and their like), seen as the decoding loop needs it.

    :meth:`read` gives the target for one prompt; ids in and out are the decoder's, which start with the model's
    ``decoder_start_token_id``. Its layers are not looked into: heads and early layers do not draft for it.

    Args:
        model: a sequence-to-sequence model of transformers, possibly PEFT-wrapped. It is put into eval mode.
        name: what to call it; the model's own name by default.

    Raises:
        ValueError: it is no encoder-decoder, or has no output matrix.
    """

    kind = AutoModelForSeq2SeqLM

    def __init__(self, model: PreTrainedModel, *, name: str | None = None) -> None:
        if not getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"{type(model).__name__} is no encoder-decoder: wrap it as heads.Target(model)")
        self.model = self.call = model.eval()
        self.name = name or str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        self.config: Any = compat.decoder_config(model)
        self.embedding = self._need("get_input_embeddings", "an input embedding")
        self.output = self._need("get_output_embeddings", "an output matrix")
        self.vocab_size = self.output.out_features
        text = self.config.get_text_config(decoder=True)
        self.num_layers, self.hidden_size = text.num_hidden_layers, text.hidden_size
        self.layer_types = tuple(getattr(text, "layer_types", None) or ["full_attention"] * self.num_layers)
        self.sliding_window = getattr(text, "sliding_window", None)
        self.max_positions = getattr(text, "max_position_embeddings", None)  # none where biases are relative
        self.by_place, self.rotary_border = "positions", compat.rotary_border(text)
        self.source: Source | None = None
        self._encoded: Any = None  # what the encoder made of the prompt, once a pass needed it
        self._cross = DynamicCache()
        self._tokenizer = None

    def read(self, source: Source) -> Seq2SeqTarget:
        """The same model for one prompt, which its encoder reads in the first pass."""
        other = copy.copy(self)
        other.source = Source(source.ids.to(self.device), source.mask.to(self.device))
        other._encoded, other._cross = None, DynamicCache()
        return other

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        *,
        cache: Any = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        starts: Sequence[int] | None = None,
        keys: Tensor | None = None,
        taps: Sequence[int] = (),
        hidden: bool = False,
        logits_to_keep: int | Tensor = 0,
    ) -> TargetOutput:
        """One pass of the decoder over a chain; arguments as for :meth:`heads.Target.forward`.

        Raises:
            ValueError: no prompt was read, the rows are no chain behind what the cache holds, or hidden states are
                asked for.
        """
        if self.source is None:
            raise ValueError(f"{self.name} has read no prompt: decode with what read(source) returns")
        if taps or hidden:
            self._no("reading hidden states is")
        if mask is not None or positions is not None:
            self._check_rows(0 if cache is None else cache.get_seq_length(), ids.shape[1], mask, positions)
        if self._encoded is None:
            encoder: Any = self.model.get_encoder()
            self._encoded = encoder(input_ids=self.source.ids, attention_mask=self.source.mask)
        kwargs: dict[str, Any] = {"decoder_input_ids": ids, "use_cache": cache is not None}
        if cache is not None:
            kwargs[compat.cache_argument(self.plain)] = EncoderDecoderCache(cache, self._cross)
        out = self.call(encoder_outputs=self._encoded, attention_mask=self.source.mask, **kwargs)
        kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        return TargetOutput(logits=out.logits[:, kept], taps=None, hidden=None)

    def _check_rows(self, base: int, rows: int, mask: Tensor | None, positions: Tensor | None) -> None:
        """The decoder masks and counts by itself, from what the cache holds; what is asked for must be just that."""
        in_order = positions is None or positions[0].tolist() == list(range(base, base + rows))
        plain = torch.ones(rows, base + rows, dtype=torch.bool).tril(base)
        if not in_order or (mask is not None and not torch.equal(mask[0, 0].cpu(), plain)):
            raise ValueError(f"{self.name} is an encoder-decoder, whose drafts are chains: this one is a tree")

    def identity(self) -> TargetIdentity:
        """Refused: heads would record it."""
        self._no("heads are")

    def self_check(self) -> None:
        """Refused: heads would rely on it."""
        self._no("heads are")

    def partial(self, layers: Sequence[int]) -> NoReturn:
        """Refused."""
        self._no("drafting with its own layers is")

    def _no(self, what: str) -> NoReturn:
        raise ValueError(
            f"{self.name} is an encoder-decoder, where {what} not supported: draft with a smaller encoder-decoder"
        )
