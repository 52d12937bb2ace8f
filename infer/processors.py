"""The target's distribution at every node, under exactly the processors ``model.generate`` would build.

transformers' private builders are called here and nowhere else, so that defaults, order and merging with the
user's own processors are the library's, not a second version of them. Each row of a pass is processed when it is
asked for (filters of a vocabulary cost up to milliseconds a row), with the prefix that row stands for, drafts
included. Rows are asked for along the accepted path only, once for each emitted token and in order, so that rejected
drafts leave no trace even in a processor that keeps a state. Rules that look ahead are shown what copies of such
processors make of a node (:mod:`infer.foresight`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from heads.draft import Draft
from infer.foresight import PREFIX_FREE, STATELESS, copied, copyable
from infer.nucleus import quick
from infer.tokens import Tokens


@dataclass
class Prepared:
    """What ``model.generate`` would work with: settings with all defaults, processors, criteria and mask.

    ``start`` (1, m) is what the decoder of an encoder-decoder begins with; None where that is the prompt.
    """

    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    attention_mask: Tensor
    start: Tensor | None = None


def prepare(
    model: Any,
    ids: Tensor,
    generation_config: GenerationConfig | None,
    settings: dict[str, Any],
    *,
    check: Callable[[GenerationConfig, dict[str, Any]], None],
    attention_mask: Tensor | None = None,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    tokenizer: Any = None,
) -> Prepared:
    """Settings, processors and criteria as ``model.generate(ids, generation_config, **settings)`` makes them.

    Args:
        model: a transformers model, possibly wrapped by an adapter.
        ids: (1, n) prompt.
        settings: generation parameters given by name.
        check: called with the complete settings and what was left of ``settings``; raises for what is refused.
        attention_mask: (1, n); None leaves it to transformers to recognise padding.
        tokenizer: needed for stop strings.

    Raises:
        ValueError: what transformers itself refuses (no room for a token, stop strings without a tokenizer, …).
    """
    own, defaults = generation_config, model.generation_config

    def unset(name: str) -> bool:
        return settings.get(name) is None and getattr(own, name, None) is None and getattr(defaults, name) is None

    default_max, default_min = unset("max_length"), unset("min_length")
    if settings.get("output_scores") or settings.get("output_logits"):  # transformers would warn of ignoring them
        settings = settings | {"return_dict_in_generate": True}
    config, rest = model._prepare_generation_config(own, **settings)
    check(config, rest)
    model._prepare_special_tokens(config, attention_mask is not None, device=ids.device, batch_size=1)
    start = _decoder_start(model, config, ids) if model.config.is_encoder_decoder else None
    if attention_mask is None and start is not None:
        attention_mask = torch.ones_like(ids)  # an encoder reads all it is given
    elif attention_mask is None:  # padding is recognised by the pad token, where that is no end of sequence
        attention_mask = model._prepare_attention_mask_for_generation(ids, config, {})
    length = (ids if start is None else start).shape[1]
    config = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=default_max,
        has_default_min_length=default_min,
        model_input_name="input_ids",
        input_ids_length=length,
        inputs_tensor=ids,
    )
    model._validate_generated_length(config, length, default_max)
    alone = copy.copy(config)  # each text is scored alone, however many there are of a prompt
    alone.num_return_sequences = 1
    processors = model._get_logits_processor(
        generation_config=alone,
        input_ids_seq_length=length,
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        logits_processor=LogitsProcessorList(logits_processor or []),
        device=ids.device,
        model_kwargs={"attention_mask": None if bool(attention_mask.all()) else attention_mask},
    )
    criteria = model._get_stopping_criteria(
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(stopping_criteria or []),
        tokenizer=tokenizer,
    )
    return Prepared(config, quick(processors), criteria, attention_mask, start)


def _decoder_start(model: Any, config: GenerationConfig, ids: Tensor) -> Tensor:
    """(1, 1) the id that an encoder-decoder's answer starts with."""
    first = config._decoder_start_token_tensor
    start, _ = model._prepare_decoder_input_ids_for_generation(1, "input_ids", {}, first, ids.device)
    return start


class NodeScores:
    """Processed scores of one pass, row by row; node -1 is the root.

    Args:
        processors: the user's, in the library's order.
        logits: (1 + nodes, V) of the target's pass.
        draft: the nodes behind the rows.
        tokens: what is committed, the root last.
        exact: decide in float64 (a float64 target); float32 otherwise. Scores are float32 either way, as
            ``model.generate`` has them.
    """

    def __init__(
        self, processors: LogitsProcessorList, logits: Tensor, draft: Draft, tokens: Tokens, exact: bool = False
    ) -> None:
        self.logits = logits.float()
        self._processors: Callable[[Tensor, Tensor], Tensor] = processors  # type: ignore[assignment]
        self._kinds: Sequence[Any] = processors
        self._stateless = all(type(processor) in STATELESS for processor in processors)
        self._draft, self._tokens = draft, tokens
        self._dtype = torch.float64 if exact else torch.float32
        self._rows: dict[int, Tensor] = {}
        self._ahead: dict[int, tuple[Tensor, LogitsProcessorList]] = {}
        self._prefix_free = all(type(processor) in PREFIX_FREE for processor in processors)

    def scores(self, node: int) -> Tensor:
        """(V,) processed scores after ``node``."""
        if node not in self._rows:
            row = self.logits[node + 1 : node + 2]
            seen_by = (self._tokens.view(), row) if self._prefix_free else self._seen_by(node)
            self._rows[node] = (self._processors(*seen_by) if self._kinds else row)[0]
        return self._rows[node]

    def best(self, node: int) -> int:
        """Arg-max token after ``node``."""
        return int(self.scores(node).argmax())

    def p(self, node: int) -> Tensor:
        """(V,) distribution of the token after ``node``."""
        return self.scores(node).softmax(-1, dtype=self._dtype)

    @property
    def foresight(self) -> bool:
        """Whether nodes may be peeked at: every processor is stateless or can be copied."""
        return all(map(copyable, self._kinds))

    def peek(self, node: int) -> Tensor:
        """(V,) distribution of the token after ``node``, computed on copies of processors that keep a state.

        Raises:
            ValueError: a processor cannot be copied.
        """
        return self._foreseen(node).softmax(-1, dtype=self._dtype)

    def settle(self, path: Sequence[int]) -> None:
        """Show the processors that keep a state the accepted nodes, and no others, in order."""
        if self._ahead:
            for node in [-1, *path]:
                self.scores(node)

    def _foreseen(self, node: int) -> Tensor:
        if node in self._rows or self._stateless:
            return self.scores(node)
        if node not in self._ahead:
            before: Sequence[Any] = self._kinds
            if node >= 0:  # each node's copies have seen its ancestors
                parent = self._draft.parents[node]
                self._foreseen(parent)
                before = self._ahead[parent][1]
            for processor in before:
                if not copyable(processor):
                    raise ValueError(
                        f"{type(processor).__name__} cannot be copied, so no rule may look ahead with it: use the rule "
                        "'auto' or 'token', or make it a LogitsProcessor that holds plain data only"
                    )
            now = LogitsProcessorList(copied(before))
            self._ahead[node] = now(*self._seen_by(node))[0], now  # type: ignore[arg-type]
        return self._ahead[node][0]

    def _seen_by(self, node: int) -> tuple[Tensor, Tensor]:
        """The node's prefix (1, n), and its logits (1, V), copied since some processors write into them."""
        prefix = self._tokens.followed_by([self._draft.tokens[i] for i in self._draft.path(node)])
        return prefix, self.logits[node + 1 : node + 2].clone()
