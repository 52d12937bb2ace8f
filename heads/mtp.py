"""The target drafts for itself: masks behind the text, a LoRA adapter for these alone (gated LoRA, arXiv 2507.11851).

Mask rows ride along in the verification pass, at the positions that follow. An adapter acts on them and contributes
nothing to the rows that are verified, so that one pass verifies a draft and makes the next one::

      position     i        i+1      i+2      i+3
      row        x_i        m_1      m_2      m_3        x_i: the target as it is, its logits give x_{i+1}
                             │        │        │         m_j: sees the text up to x_i and the masks up to its own
                          x_{i+2}  x_{i+3}  x_{i+4}      sampler: [state of m_j; embedding of the token before]

What is trained is the adapter, the masks' embeddings and the sampler, a small MLP that ties each token to the one
before; logits are made by the target's own output matrix. In training each anchor, a row of a text drawn anew each
pass, has masks of its own behind it, which read the text from the keys and values of one ordinary pass. The paper's
third term draws a mask's state towards that of the ordinary row whose token it drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heads.anchors import anchors_of, draw_anchors
from heads.base import LossReport
from heads.behind import apart, read_behind
from heads.config import ConfigError, HeadsConfig
from heads.draft import Draft
from heads.gate import gated
from heads.grow import Budget, Sampler
from heads.inside import DraftsInside, ExtraRows
from heads.judge import Criterion, Output, TrainingBatch, UnrollStep
from heads.lora import LoraPair, linear_layers, make_adapter, tree
from heads.mtp_rows import place, reserved
from heads.mtp_sampler import Conditional
from heads.mtp_state import MtpGrower, MtpState
from heads.rows import drafted_from
from heads.target import Target

DEFAULTS: dict[str, Any] = {
    "lora_r": 32,  # rank; the paper's models of 8B have 128
    "lora_alpha": 64,  # what the adapter adds is scaled by this over its rank
    "lora_dropout": 0.0,
    "lora_rslora": False,  # scale by the rank's square root instead
    "anchors": 0.125,  # share of a text's rows that a training pass drafts from, drawn anew each pass
    "position_decay": 0.8,  # weight of draft position j is this to the power j
    "base_weight": 0.5,  # of the same loss on what masks say before the sampler knows the token before
    "consistency_weight": 0.5,  # of the distance to the ordinary row's state, as a share of that state's own square
    "rms_norm_eps": 1e-5,
}


@dataclass
class MtpStep(UnrollStep):
    """A step that also knows its masks' own states (n, H)."""

    masks: Tensor = field(default_factory=lambda: torch.empty(0))


class Mtp(DraftsInside):
    """The heads; the look-ahead is the number of masks.

    Raises:
        ConfigError: an option is out of its range, or the target has no rows or layers that these heads could use.
    """

    def __init__(self, config: HeadsConfig, target: Target) -> None:
        super().__init__(config, target)
        o, width = config.options, config.hidden_size
        _check(config, target)
        adapter = make_adapter(
            linear_layers(target),
            r=o["lora_r"],
            alpha=o["lora_alpha"],
            dropout=o["lora_dropout"],
            rslora=o["lora_rslora"],
            modules=o["lora_modules"],
        )
        self.base_model = tree({f"model.{name}": pair for name, pair in adapter.items()})  # as PEFT's files name it
        self.masks = nn.Parameter(torch.zeros(config.lookahead, width))
        self.sampler = Conditional(width, o["sampler_size"], o["rms_norm_eps"])

    def passes(self, depth: int) -> int:
        """None of their own: masks ride in the pass that verifies."""
        return 0

    @classmethod
    def default_options(cls, target: Target) -> dict[str, Any]:
        """All linear layers are adapted."""
        names = sorted({name.rpartition(".")[2] for name in linear_layers(target)})
        return DEFAULTS | {"lora_modules": names, "sampler_size": target.hidden_size}

    @torch.no_grad()
    def initialize(self) -> None:
        """Masks start like random tokens; PEFT's adapter adds nothing at first, nor does the sampler."""
        rows = min(self.target.vocab_size, self.target.embedding.weight.shape[0])
        some = torch.linspace(0, rows - 1, min(rows, 4096), device=self.target.device).long()
        known = self.target.embed(some).float()
        noise = torch.randn(self.masks.shape).to(known)
        self.masks.copy_(known.mean(0) + known.std() * noise)
        nn.init.zeros_(self.sampler.down_proj.weight)

    @property
    def adapter(self) -> dict[str, LoraPair]:
        """By the name of the linear layer."""
        named = self.base_model.get_submodule("model").named_modules()
        return {name: pair for name, pair in named if isinstance(pair, LoraPair)}

    # what training and decoding share

    def applied(self, target: Target, first: int, slots: Tensor) -> AbstractContextManager[None]:
        """See :meth:`heads.inside.DraftsInside.applied`."""
        return gated(target, self.adapter, self.masks, first, slots)

    def sample(self, states: Tensor, before: Tensor) -> Tensor:
        """States (n, H) that logits are made of, where the masks' (n or 1, H) follow tokens ``before`` (n,)."""
        return self.sampler(states, self.target.embed(before))

    def project(self, states: Tensor) -> Tensor:
        """Logits (n, Vd) of states (n, H)."""
        return self.target.project_rows(states.to(self.target.dtype), self.draft_ids)  # heads may train wider

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        """Logits (n, Vd) of the tokens that follow ``before`` (n,), of masks' states (n or 1, H)."""
        return self.project(self.sample(states, before))

    # training

    @property
    def share(self) -> float | None:
        """Of the rows, what a pass drafts from; None for all."""
        return float(self.config.options["anchors"]) if self.training else None

    def count(self, loss_mask: Tensor) -> Tensor:
        """Rows of the passes to come: while training only the anchors', of which each text has a fixed number."""
        rows = loss_mask[:, 2:].sum(1)
        return (rows if self.share is None else anchors_of(rows, self.share)).sum()

    def loss(
        self,
        batch: TrainingBatch,
        criterion: Criterion,
        *,
        measure: bool = True,
        weights: Sequence[float] | None = None,
    ) -> LossReport:
        """The sampler's loss, the same loss on what masks say by themselves, and the distance of their states.

        Acceptance is the sampler's, which is what drafts.
        """
        steps = list(self.unroll(batch))
        report = self.report(steps, batch, criterion, measure=measure, weights=weights)
        share = float(self.config.options["base_weight"])
        if share:
            alone = [UnrollStep(step.masks, step.output, step.batch, step.row) for step in steps]
            base = self.report(alone, batch, criterion, measure=False, weights=weights)
            report.total = report.total + share * base.total
            report.terms |= {f"base_{name}": share * value for name, value in base.terms.items()}
        return report

    def unroll(self, batch: TrainingBatch) -> Iterator[MtpStep]:
        """Masks behind each anchor: rows whose next-but-one token is trained, all of them in eval mode."""
        order, valid = draw_anchors(drafted_from(batch), batch.texts, self.share)
        where, place = valid.nonzero(as_tuple=True)
        row, last = order[where, place], batch.ids.shape[1] - 1
        states = self.read_masks(batch, order)[where, place]
        output = Output(lambda states, _: self.project(states))
        weight = float(self.config.options["consistency_weight"])
        for j in range(self.config.lookahead):
            at = (row + 1 + j).clamp(max=last)
            masks, terms = states[:, j], {}
            if weight:
                terms["consistency"] = weight * apart(masks, batch.hidden[where, at])
            yield MtpStep(self.sample(masks, batch.ids[where, at]), output, where, row, terms=terms, masks=masks)

    def read_masks(self, batch: TrainingBatch, rows: Tensor) -> Tensor:
        """States (B, R, K, H) of the masks behind rows (B, R) of texts."""
        return read_behind(self, batch, rows, self.config.lookahead)

    # decoding

    def usual(self, depth: int) -> Budget:
        """As many masks behind each token of a chain as the chain has tokens, and behind the root (quadratic)."""
        depth = min(depth, self.config.lookahead)
        return Budget(rows=(depth + 1) ** 2, depth=depth)

    def reserve(self, budget: Budget) -> Budget:
        """See :func:`heads.mtp_rows.reserved`."""
        return reserved(budget)

    def extra_rows(self, draft: Draft, budget: Budget, room: int) -> ExtraRows:
        """Masks behind all nodes that rows are left for."""
        return place(draft, budget.rows - 1 - len(draft), min(self.config.lookahead, budget.depth), room)

    def start(self, taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> MtpState:
        """Nothing is known behind the prompt until a pass has had masks there."""
        if mask is not None and not bool(mask.all()):
            raise ValueError("padded prompts are not supported by mtp heads: decode one prompt at a time")
        return MtpState(ids[:, -1:], taps.new_zeros(0, self.config.hidden_size))

    def read(self, state: MtpState, states: Tensor) -> None:
        """The masks' states behind the last accepted node, (1, m, H)."""
        state.states = states[0]

    def advance(self, state: MtpState, taps: Tensor, ids: Tensor) -> None:
        """The last token is the new root; what its masks said was read when the pass came back."""
        state.root = ids[:, -1:]

    def propose(self, state: MtpState, budget: Budget, sampler: Sampler | None = None) -> Draft:
        """No deeper than there were masks."""
        return super().propose(state, budget.within(len(state.states)), sampler)

    def grower(self, state: MtpState) -> MtpGrower:
        """The last pass answers for a whole draft."""
        return MtpGrower(self, state)


def _check(config: HeadsConfig, target: Target) -> None:
    """Refuse options that cannot be meant, and targets whose passes take no such rows."""
    o, wrong = config.options, []
    if o["lora_r"] < 1 or o["sampler_size"] < 1:
        wrong.append("lora_r and sampler_size must be 1 or more")
    if not 0 <= o["lora_dropout"] < 1:
        wrong.append(f"lora_dropout must be 0 or more and below 1, not {o['lora_dropout']}")
    if not 0 < o["anchors"] <= 1:
        wrong.append(f"anchors must be a share above 0, at most 1, not {o['anchors']}")
    if config.taps != (target.num_layers,):
        wrong.append(f"taps must be [{target.num_layers}], the last state, not {list(config.taps)}")
    if target.by_place:
        wrong.append(f"{target.name} reads nothing but one text in order, because its {target.by_place} go by places")
    if wrong:
        raise ConfigError(f"mtp options: {'; '.join(wrong)}")
