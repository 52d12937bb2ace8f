"""Block-parallel heads: one pass of a small transformer drafts a whole block (DFlash, arXiv 2602.06036).

The block is the root, the last committed token, and masks behind it. What the target felt while it read the text is
not an input but something to attend: the fused taps become keys and values in every layer, through the very
projections that serve the block. Slot k drafts the token behind it, as in DSpark (arXiv 2607.05147); unless
``shifted``, the token of its own place, as in DFlash, and the root's slot drafts nothing::

      context   C = hidden_norm(fc(taps)) of positions < a           keys and values only, no residual stream
      block     [x_a, MASK, MASK, …]   at positions a, a+1, a+2, …   every slot sees all of C and all of the block
                  │     │     │
      drafts    x_{a+1} x_{a+2} x_{a+3}      plus, on the logits, DSpark's low-rank bias of the token before

In training every anchor a (row a - 1, whose taps are the last it may see) has a block of its own, which no other
block sees; each pass draws anew a share of the rows to be anchors. The layers are built and named as DFlash's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heads.anchors import anchors_of, draw_anchors
from heads.base import DraftHeads
from heads.block_layer import BlockLayer, attend_blocks
from heads.block_state import BlockGrower, BlockState
from heads.config import ConfigError, HeadsConfig
from heads.eagle import Eagle
from heads.judge import Output, TrainingBatch, UnrollStep
from heads.layer import check_window, layer_shape
from heads.markov import Confidence, Markov
from heads.mask_token import special_tokens, unused_token
from heads.norm import RMSNorm
from heads.rotary import rotary
from heads.rows import drafted_from, positions_of, visible
from heads.target import Target

DEFAULTS: dict[str, Any] = {
    "layers": 2,  # DSpark reports two with a bias ahead of five without (arXiv 2607.05147)
    "markov_rank": 64,  # of the bias by the token before; 0: slots do not know what was drafted before them
    "shifted": True,  # a slot drafts the token behind it; else that of its own place, and one slot more is read
    "anchors": 0.25,  # share of a text's rows that a training pass drafts from, drawn anew each pass
    "position_decay": 0.8,  # weight of draft position j is this to the power j: exp(-j / 4.5)
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "window": 0,  # positions of context that a block attends, the last ones; 0: all
    "own_output": False,  # train an output matrix, which starts as the target's rows, instead of using those
    "confidence": False,  # also learn how likely each draft is to be accepted
    "confidence_weight": 1.0,  # of that in the loss
    "stop_below": 0.0,  # end a chain where its chance of being accepted so far falls below this; 0: never
}


class Block(DraftHeads):
    """The heads; the look-ahead is the number of slots that draft.

    Raises:
        ConfigError: an option is out of its range, or they contradict each other.
    """

    later_options: ClassVar[dict[str, Any]] = {"window": 0}

    def __init__(self, config: HeadsConfig, target: Target) -> None:
        super().__init__(config, target)
        o, width = config.options, config.hidden_size
        _check(o, target)
        rows = config.draft_vocab_size or config.vocab_size
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=o["rms_norm_eps"])
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(o["layers"]))
        self.norm = RMSNorm(width, eps=o["rms_norm_eps"])
        self.lm_head = nn.Linear(width, rows, bias=False) if o["own_output"] else None
        self.markov = Markov(config.vocab_size, rows, o["markov_rank"]) if o["markov_rank"] else None
        self.confidence = Confidence(width + o["markov_rank"]) if o["confidence"] else None

    @classmethod
    def default_taps(cls, target: Target) -> tuple[int, ...]:
        """Those of eagle, so that one cache of the target's states serves both; never the last layer's output."""
        return Eagle.default_taps(target)

    def passes(self, depth: int) -> int:
        """A block is drafted at once."""
        return 1

    @classmethod
    def default_options(cls, target: Target) -> dict[str, Any]:
        """Layers take the shape of the target's own; the mask is a token that texts do not use."""
        return DEFAULTS | layer_shape(target) | {"mask_token_id": unused_token(target)}

    def initialize(self) -> None:
        """First logits are near uniform under the target's rows, and the bias is zero (see ``Eagle.initialize``)."""
        weight = self.target.output.weight.detach()
        rows = (weight if self.draft_ids is None else weight[self.draft_ids]).float()
        self.norm.weight.data.fill_(1.0 / float(rows.norm(dim=1).mean()))
        if self.lm_head is not None:
            self.lm_head.weight.data.copy_(rows)
        if self.markov is not None:
            self.markov.initialize()

    # what training and decoding share

    def context(self, taps: Tensor) -> Tensor:
        """C (…, H) of taps (…, taps·H)."""
        return self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))

    def context_keys(self, i: int, context: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Layer i's keys and values (B, kv_heads, n, head_dim) of context (B, n, H)."""
        layer = self.layers[i]
        assert isinstance(layer, BlockLayer)
        return layer.keys_values(context, rotation)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary factors of positions (B, n)."""
        o = self.config.options
        return rotary(positions, o["head_dim"], float(o["rope_theta"]), dtype)

    @property
    def first_slot(self) -> int:
        """The slot that drafts the token behind the root."""
        return 0 if self.config.options["shifted"] else 1

    @property
    def block_size(self) -> int:
        """Slots of a block, those that draft nothing included."""
        return self.config.lookahead + self.first_slot

    def slots(self, roots: Tensor) -> Tensor:
        """What the slots of blocks on ``roots`` (…) read: embeddings (…, slots, H)."""
        masks = roots.new_full((*roots.shape, self.block_size - 1), self.config.options["mask_token_id"])
        return self.target.embed(torch.cat([roots[..., None], masks], -1)).to(self.fc.weight.dtype)

    def run(self, hidden: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Normed outputs (B, n, H) of slots (B, n, H) at positions (B, n); ``attend`` knows what layer i may see."""
        rotation = self.rotation(positions, hidden.dtype)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, partial(attend, i))
        return self.norm(hidden)

    def unary(self, hidden: Tensor) -> Tensor:
        """Logits (…, Vd) of normed outputs (…, H), the token before not yet known."""
        if self.lm_head is not None:
            return self.target.transform(self.lm_head(hidden))
        return self.target.project_rows(hidden.to(self.target.dtype), self.draft_ids)  # heads may train wider

    def biased(self, unary: Tensor, before: Tensor) -> Tensor:
        """Logits (n, Vd) where the slots' tokens follow those of ids ``before`` (n,); ``unary`` (n or 1, Vd)."""
        if self.markov is None:
            return unary.expand(before.shape[0], -1)
        return unary + self.markov(before)

    def trust(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logit (n,) of the chance that what slots (n or 1, H) draft behind ``before`` (n,) is accepted."""
        assert self.confidence is not None
        codes = self.markov.code(before) if self.markov is not None else None
        return self.confidence(hidden.expand(before.shape[0], -1), codes)

    # training

    def count(self, loss_mask: Tensor) -> Tensor:
        """Rows of the passes to come: while training only the anchors', of which each text has a fixed number."""
        rows = loss_mask[:, 2:].sum(1)
        return (rows if self.share is None else anchors_of(rows, self.share)).sum()

    @property
    def share(self) -> float | None:
        """Of the rows, what a pass drafts from; None for all."""
        return float(self.config.options["anchors"]) if self.training else None

    def unroll(self, batch: TrainingBatch) -> Iterator[UnrollStep]:
        """A block behind each anchor: rows whose next-but-one token is trained, all of them in eval mode."""
        order, valid = draw_anchors(drafted_from(batch), batch.texts, self.share)
        where, place = valid.nonzero(as_tuple=True)
        length, slots = batch.ids.shape[1], self.block_size
        context = self.context(batch.taps)
        rotation = self.rotation(batch.positions, context.dtype)
        seen = visible(batch, order, self.config.options["window"])  # never by block: anchors lie closer than that

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_blocks(q, *self.context_keys(i, context, rotation), seen, k, v)

        # row i's anchor is at i + 1 and so is its first slot
        following = (order[..., None] + 1 + torch.arange(slots, device=order.device)).flatten(1)
        tokens = batch.ids.gather(1, following.clamp(max=length - 1)).unflatten(1, (-1, slots))
        ahead = torch.arange(1, 1 + slots, device=order.device)
        stand = (positions_of(batch, order)[..., None] + ahead).flatten(1)
        out = self.run(self.slots(tokens[..., 0]).flatten(1, 2), stand, attend)
        hidden, before = out.unflatten(1, (-1, slots))[where, place, self.first_slot :], tokens[where, place]
        used = tuple(module for module in (self.lm_head, self.markov) if module is not None)
        for j in range(self.config.lookahead):
            yield UnrollStep(
                hidden[:, j],
                Output(partial(self._slot_logits, before[:, j]), used),
                where,
                order[where, place],
                self.trust(hidden[:, j], before[:, j]) if self.confidence is not None else None,
            )

    def _slot_logits(self, before: Tensor, hidden: Tensor, rows: Tensor) -> Tensor:
        return self.biased(self.unary(hidden), before[rows])

    # decoding

    def start(self, taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> BlockState:
        """The prompt's taps are context, the root is what the first block stands on."""
        if mask is not None and not bool(mask.all()):
            raise ValueError("padded prompts are not supported by block heads: decode one prompt at a time")
        return BlockState(self, taps, ids[:, -1:])

    def advance(self, state: BlockState, taps: Tensor, ids: Tensor) -> None:
        """Committed positions become context; nothing of the block is kept."""
        state.commit(taps, ids[:, -1:])

    def grower(self, state: BlockState) -> BlockGrower:
        """One pass answers for a whole draft."""
        return BlockGrower(state)


def _check(options: dict[str, Any], target: Target) -> None:
    """Refuse options that cannot be meant."""
    check_window(options["window"])
    wrong = []
    if options["layers"] < 1 or options["markov_rank"] < 0:
        wrong.append("layers must be 1 or more and markov_rank 0 or more")
    if not 0 < options["anchors"] <= 1:
        wrong.append(f"anchors must be a share above 0, at most 1, not {options['anchors']}")
    if options["stop_below"] and not options["confidence"]:
        wrong.append("stop_below needs confidence: true, which is what it reads")
    rows = min(target.vocab_size, target.embedding.weight.shape[0])
    mask = options["mask_token_id"]
    if not 0 <= mask < rows or mask in special_tokens(target):
        wrong.append(f"mask_token_id must be 0 to {rows - 1} and no token that begins, ends or fills texts, not {mask}")
    if wrong:
        raise ConfigError(f"block options: {'; '.join(wrong)}")
