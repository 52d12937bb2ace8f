"""The calls users make: ``generate`` and ``stream``. Same text as ``model.generate``, fewer passes of the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from heads.base import DraftHeads
from heads.grow import Budget, Sampler
from infer import drafters, processors
from infer.arguments import check, evaluating, known_tokenizer, read_model, read_prompt, take, target_of, unpadded
from infer.decode import Decoding
from infer.metrics import Stats, mark_loops
from infer.stopping import Stop
from infer.stream import Sink, TextPieces, decode, make_sink
from infer.verify import RandomChooser


@dataclass
class Generation:
    """What came of one call.

    Attributes:
        sequences: (1, n) prompt and new tokens, as ``model.generate`` returns them.
        texts: the new text, special tokens skipped; None where no tokenizer is known.
        stats: rounds, acceptance and times.
        scores: with ``output_scores``, the processed scores (1, V) of each new token.
        logits: with ``output_logits``, the target's raw logits (1, V) of each new token.
    """

    sequences: Tensor
    texts: list[str] | None
    stats: Stats
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None


def generate(
    model: Any,
    prompt: Any,
    draft: Any = None,
    tokenizer: Any = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    stream: Any = None,
    *,
    budget: Budget | None = None,
    **generation_kwargs: Any,
) -> Generation:
    """Decode one prompt; the output is the target's own, whatever the draft.

    Greedy text equals that of ``model.generate``; sampled text has exactly its law.

    Args:
        model: a transformers model, a ``heads.Target``, or a heads repository (path or Hub id), whose target is
            loaded and whose heads draft.
        prompt: text, chat messages, or token ids (1, n), with ``attention_mask=`` for left padding.
        draft: heads, a drafter (``infer.drafters.Drafter``), ``"heads"`` or ``"none"``. None: the heads that came
            with the model, or no draft.
        tokenizer: for text in and out; the target's own where its name leads to it.
        generation_config, generation_kwargs: as for ``model.generate``.
        seed: of everything drawn in this call; torch's global generator otherwise.
        stream: called with each piece of new text, or a streamer of transformers.
        budget: size and shape of drafts; a chain as long as the drafter's look-ahead by default.

    Raises:
        ValueError: an argument that is unknown, wrong or not supported; its name and the reason are given.
    """
    call = _Call(model, prompt, draft, tokenizer, generation_config, seed, stream, budget, generation_kwargs)
    for _ in call.run():
        pass
    return call.result()


def stream(
    model: Any,
    prompt: Any,
    draft: Any = None,
    tokenizer: Any = None,
    generation_config: GenerationConfig | None = None,
    seed: int | None = None,
    *,
    budget: Budget | None = None,
    **generation_kwargs: Any,
) -> Iterator[str]:
    """Decode one prompt and yield pieces of the new text as they come; joined, they are the whole text.

    Arguments and errors as for :func:`generate`; wrong arguments raise here, before the first piece is asked for.
    """
    call = _Call(model, prompt, draft, tokenizer, generation_config, seed, None, budget, generation_kwargs)
    return _pieces(call, TextPieces(call.need_tokenizer()))


def _pieces(call: _Call, text: TextPieces) -> Iterator[str]:
    for tokens in call.run():
        piece = text.push(tokens)
        if piece:
            yield piece
    rest = text.rest()
    if rest:
        yield rest


class _Call:
    """One call: arguments read and checked, ready to run."""

    def __init__(
        self,
        model: Any,
        prompt: Any,
        draft: Any,
        tokenizer: Any,
        generation_config: GenerationConfig | None,
        seed: int | None,
        stream: Any,
        budget: Budget | None,
        kwargs: dict[str, Any],
    ) -> None:
        taken, settings = take(kwargs)
        streamer = taken.pop("streamer")
        if stream is not None and streamer is not None:
            raise ValueError("stream and streamer are the same thing: give one of them")
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
            self.shown = read_prompt(prompt, self.need_tokenizer).to(self.target.device)
            self._read(
                prompt, drafters.make(draft, heads, self.target), generation_config, seed, budget, taken, settings
            )
        self.sink: Sink | None = make_sink(stream if stream is not None else streamer, self.need_tokenizer)

    def _read(
        self,
        prompt: Any,
        drafter: drafters.Drafter,
        generation_config: GenerationConfig | None,
        seed: int | None,
        budget: Budget | None,
        taken: dict[str, Any],
        settings: dict[str, Any],
    ) -> None:
        mask = taken["attention_mask"]
        if mask is not None and not isinstance(prompt, Tensor):
            raise ValueError("attention_mask belongs to a prompt of token ids")
        if int(self.shown.max()) >= self.target.vocab_size or int(self.shown.min()) < 0:
            raise ValueError(f"the prompt has ids outside the target's vocabulary of {self.target.vocab_size}")
        if settings.get("stop_strings") is not None:
            self.need_tokenizer()
        prepared = processors.prepare(
            self.target.model,
            self.shown,
            generation_config,
            settings,
            check=check,
            tokenizer=self._tokenizer,
            **taken,
        )
        self.config = prepared.config
        generator = None
        if seed is not None:
            generator = torch.Generator(self.target.device).manual_seed(seed)
        budget = budget or Budget.chain(drafter.lookahead)
        self.decoding = Decoding(
            target=self.target,
            ids=unpadded(self.shown, prepared.attention_mask),
            drafter=drafter,
            budget=budget,
            stop=Stop.from_criteria(prepared.criteria, prepared.config.max_length),
            shown=self.shown,
            processors=prepared.processors,
            do_sample=bool(self.config.do_sample),
            chooser=RandomChooser(generator),
            sampler=self._sampler(budget, generator),
            keep_scores=bool(self.config.output_scores or self.config.output_logits),
        )

    def _sampler(self, budget: Budget, generator: torch.Generator | None) -> Sampler | None:
        """Chains are drawn when the output is, from the heads' distribution under the same warpers; trees never."""
        config = self.config
        if not config.do_sample or budget.width > 1 or budget.shape is not None:
            return None
        return Sampler(config.temperature or 1.0, config.top_k or None, config.top_p, generator)

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

    def run(self) -> Iterator[list[int]]:
        """Decode, feeding the stream; yields the tokens of each round."""
        parts = [self.target.model]
        if isinstance(self.decoding.drafter, drafters.HeadsDrafter):
            parts.append(self.decoding.drafter.heads)
        with evaluating(*parts):
            if self.sink is not None:
                self.sink.prompt(self.shown)
            for tokens in self.decoding.run():
                if self.sink is not None:
                    self.sink.push(tokens)
                yield tokens
            if self.sink is not None:
                self.sink.end()

    def result(self) -> Generation:
        """What was decoded."""
        decoding, config = self.decoding, self.config
        sequences = decoding.tokens.view().clone()
        new = sequences[0, self.shown.shape[1] :].tolist()
        mark_loops(decoding.stats.log, new)
        return Generation(
            sequences=sequences,
            texts=None if self._tokenizer is None else [decode(self._tokenizer, new)],
            stats=decoding.stats,
            scores=tuple(s[None].clone() for s in decoding.scores) if config.output_scores else None,
            logits=tuple(s[None].clone() for s in decoding.logits) if config.output_logits else None,
        )
