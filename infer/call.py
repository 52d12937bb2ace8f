"""One call of ``generate`` or ``stream``: arguments read and checked, texts set up, decoded, and put together."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from heads.base import DraftHeads
from heads.grow import Budget, Sampler
from heads.target import Target
from infer import drafters, processors
from infer.arguments import check, evaluating, known_tokenizer, read_model, read_prompts, take, target_of, unpadded
from infer.controls import make as make_control
from infer.decode import Decoding
from infer.generation import Generation, assemble
from infer.passes import Passes
from infer.prefix import PrefixCache
from infer.seq2seq import Seq2SeqTarget, Source
from infer.soundness import check_rows
from infer.stopping import Stop
from infer.stream import Sink, make_sink
from infer.verify import RandomChooser, named


@dataclass(frozen=True)
class Manner:
    """How to draft and verify; what of ``generate``'s arguments ``model.generate`` does not have.

    Attributes:
        budget: size and shape of drafts; a chain as long as the drafter's look-ahead by default.
        rule: acceptance rule by name, or ``"auto"``: the best for each draft (``verify.choose_rule``).
        control: ``"fixed"``: every draft as large as ``budget`` allows; ``"auto"``: as large as pays, within ``budget``
            (``infer.control``); or a control of the caller's.
        prefix: beginnings that earlier calls have read.
        passes: of a fixed number of rows, with the same text whatever the draft; compiled (``infer.passes``).
    """

    budget: Budget | None = None
    rule: str = "auto"
    control: Any = "fixed"
    prefix: PrefixCache | None = None
    passes: Passes = field(default_factory=Passes)

    def __post_init__(self) -> None:
        if self.prefix is not None and not isinstance(self.prefix, PrefixCache):
            raise ValueError(f"prefix_cache must be an infer.PrefixCache, not {type(self.prefix).__name__}")

    def settled(self, target: Target, drafter: drafters.Drafter, ids: Tensor, seed: int | None) -> Manner:
        """The same with a control that is ready, or None: costs are measured here if they are not known yet.

        Args:
            ids: (1, n) prompt behind which they would be measured.
            seed: of the call; with one the stored costs decide, without one the clock has its say.

        Raises:
            ValueError: no control has this name.
        """
        if self.control in (None, "fixed"):
            return replace(self, control=None)
        if self.control == "auto":
            return replace(self, control=make_control(target, drafter, ids, seed=seed, budget=self.budget))
        if isinstance(self.control, str) or not hasattr(self.control, "observe"):
            raise ValueError(f"control must be 'auto', 'fixed' or a control (budget, observe), not {self.control!r}")
        return self


def set_up(
    target: Target,
    shown: Tensor,
    prepared: processors.Prepared,
    drafter: drafters.Drafter,
    manner: Manner,
    generator: torch.Generator | None,
) -> Decoding:
    """One text, ready to be decoded.

    Args:
        shown: (1, n) prompt, padding included; an encoder's, where the target has one.
        prepared: what transformers made of this text's settings.
        generator: of everything drawn for it; None for torch's own.

    Raises:
        ValueError: the target cannot read such drafts.
    """
    config, budget = prepared.config, manner.budget or drafters.usual_budget(drafter)
    if target.by_place and (budget.width > 1 or budget.shape is not None):
        raise ValueError(
            f"{target.name} reads chains only, because its {target.by_place} go by places in the cache: "
            "give a budget of width 1"
        )
    if not isinstance(target, Seq2SeqTarget):
        check_rows(target)
    target, ids, shown = _begun(target, shown, prepared)
    return Decoding(
        target=target,
        ids=ids,
        drafter=drafter,
        budget=budget,
        stop=Stop.from_criteria(prepared.criteria, prepared.config.max_length),
        shown=shown,
        processors=prepared.processors,
        do_sample=bool(config.do_sample),
        rule=named(manner.rule, bool(config.do_sample)),
        chooser=RandomChooser(generator),
        sampler=None if manner.rule == "siblings" else _sampler(config, generator),  # a rule for what was not drawn
        keep_scores=bool(config.output_scores or config.output_logits),
        control=manner.control,
        fixed_rows=manner.passes.rows(budget),
    )


def _begun(target: Target, prompt: Tensor, prepared: processors.Prepared) -> tuple[Target, Tensor, Tensor]:
    """What decodes a text, the ids it begins with, and the same as the caller sees them, padding included."""
    if not isinstance(target, Seq2SeqTarget):
        return target, unpadded(prompt, prepared.attention_mask), prompt
    assert prepared.start is not None, "an encoder-decoder's text has a start"
    return target.read(Source(prompt, prepared.attention_mask)), prepared.start, prepared.start


def _sampler(config: GenerationConfig, generator: torch.Generator | None) -> Sampler | None:
    """Draws drafts when the output is drawn, from the drafter's distribution under the same warpers."""
    if not config.do_sample:
        return None
    return Sampler(config.temperature or 1.0, config.top_k or None, config.top_p, generator)


def generators(seed: int | Sequence[int] | None, rows: int, device: torch.device) -> list[torch.Generator | None]:
    """A generator for each text: one seed counts on from the first text, a list names each one's.

    Raises:
        ValueError: a list of another length.
    """
    if seed is None:
        return [None] * rows
    seeds = [seed + row for row in range(rows)] if isinstance(seed, int) else list(seed)
    if len(seeds) != rows:
        raise ValueError(f"{len(seeds)} seeds were given for {rows} texts: give one for each, or a single number")
    return [torch.Generator(device).manual_seed(int(each)) for each in seeds]


def fork(drafter: Any) -> Any:
    """A drafter for one more text.

    Raises:
        ValueError: it is one that cannot be had twice.
    """
    if not hasattr(drafter, "fork"):
        raise ValueError(f"several texts need a drafter each: {type(drafter).__name__} lacks fork()")
    return drafter.fork()


class Call:
    """Reads the arguments of ``infer.generate``; :meth:`run` decodes, :meth:`result` tells."""

    def __init__(
        self,
        model: Any,
        prompt: Any,
        draft: Any,
        tokenizer: Any,
        generation_config: GenerationConfig | None,
        seed: int | Sequence[int] | None,
        stream: Any,
        manner: Manner,
        kwargs: dict[str, Any],
    ) -> None:
        taken, settings = take(kwargs)
        streamer = taken.pop("streamer")
        if stream is not None and streamer is not None:
            raise ValueError("stream and streamer are the same thing: give one of them")
        self.manner = manner
        with ExitStack() as until_read:  # reading the model puts it in eval mode; hand it back if anything is wrong
            if isinstance(model, torch.nn.Module):
                until_read.enter_context(evaluating(model))
            heads = None
            if isinstance(model, torch.nn.Module) and isinstance(draft, DraftHeads):
                self.target = target_of(model, draft)  # type: ignore[arg-type]
            else:
                self.target, heads = read_model(model)
            self._tokenizer = tokenizer or (
                known_tokenizer(self.target) if heads is not None or model is self.target else None
            )
            self.prompts = [row.to(self.target.device) for row in read_prompts(prompt, self.need_tokenizer)]
            self._check_prompts(prompt, taken["attention_mask"])
            if settings.get("stop_strings") is not None:
                self.need_tokenizer()
            self.drafter = drafters.make(draft, heads, self.target)
            if manner.prefix is not None:
                manner.prefix.check(self.target)
            self.texts = self._texts(generation_config, settings, taken, seed)
        wanted = stream if stream is not None else streamer
        if wanted is not None and len(self.texts) > 1:
            raise ValueError(f"{len(self.texts)} texts cannot be streamed together: stream one at a time")
        self.sink: Sink | None = make_sink(wanted, self.need_tokenizer)

    def _check_prompts(self, prompt: Any, mask: Tensor | None) -> None:
        for row in self.prompts:
            if int(row.max()) >= self.target.vocab_size or int(row.min()) < 0:
                raise ValueError(f"the prompt has ids outside the target's vocabulary of {self.target.vocab_size}")
        if mask is None:
            return
        if not isinstance(prompt, Tensor):
            raise ValueError("attention_mask belongs to a prompt of token ids")
        if mask.shape != prompt.shape:
            raise ValueError(f"attention_mask is {tuple(mask.shape)} where the prompt is {tuple(prompt.shape)}")

    def _texts(
        self,
        generation_config: GenerationConfig | None,
        settings: dict[str, Any],
        taken: dict[str, Any],
        seed: int | Sequence[int] | None,
    ) -> list[Decoding]:
        """One text for each prompt and sequence to return."""
        first = self._prepare(0, 0, generation_config, settings, taken)
        self.config = first.config
        copies = self.config.num_return_sequences or 1
        places = [at for at in range(len(self.prompts)) for _ in range(copies)]
        self.prompts = [self.prompts[at] for at in places]
        drawn = generators(seed, len(places), self.target.device)
        target, ids, _ = _begun(self.target, self.prompts[0], first)
        self.manner = self.manner.settled(target, self.drafter, ids, None if seed is None else 0)
        texts = []
        for row, place in enumerate(places):
            alone = len(places) == 1
            prepared = first if alone else self._prepare(row, place, generation_config, settings, taken, own=True)
            drafter = self.drafter if row == 0 else fork(self.drafter)
            texts.append(set_up(self.target, self.prompts[row], prepared, drafter, self.manner, drawn[row]))
        self.shown = [text.ids if text.shown is None else text.shown for text in texts]
        return texts

    def _prepare(
        self,
        row: int,
        place: int,
        generation_config: GenerationConfig | None,
        settings: dict[str, Any],
        taken: dict[str, Any],
        *,
        own: bool = False,
    ) -> processors.Prepared:
        """Processors and criteria of one text; ``own``: copies of the user's, which may keep a state."""
        given = dict(taken)
        mask, allowed = given.pop("attention_mask"), given["prefix_allowed_tokens_fn"]
        if own:
            given["logits_processor"] = copy.deepcopy(given["logits_processor"])
            given["stopping_criteria"] = copy.deepcopy(given["stopping_criteria"])
        if allowed is not None:
            given["prefix_allowed_tokens_fn"] = lambda _, ids: allowed(place, ids)
        return processors.prepare(
            self.target.model,
            self.prompts[row if own else place],
            generation_config,
            dict(settings),
            check=check,
            tokenizer=self._tokenizer,
            attention_mask=None if mask is None else mask[place : place + 1],
            **given,
        )

    def need_tokenizer(self) -> Any:
        """The tokenizer, loaded by the target's name if none was given.

        Raises:
            ValueError: there is none.
        """
        if self._tokenizer is None:
            try:
                self._tokenizer = self.target.tokenizer()
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"this call needs a tokenizer and none is found for {self.target.name!r}: pass tokenizer= ({error})"
                ) from None
        return self._tokenizer

    def run(self) -> Iterator[list[list[int]]]:
        """Decode, feeding the stream; yields for each round what each text emitted."""
        with evaluating(self.target.model, *getattr(self.drafter, "modules", ())):
            if self.sink is not None:
                self.sink.prompt(self.shown[0])
            with self.manner.passes.rounds(self.texts, self.config, self.manner.prefix) as rounds:
                for emitted in rounds.run():
                    if self.sink is not None:
                        self.sink.push(emitted[0])
                    yield emitted
            if self.sink is not None:
                self.sink.end()

    def result(self) -> Generation:
        """What was decoded."""
        return assemble(self.texts, self.shown, self.config, self._tokenizer)
