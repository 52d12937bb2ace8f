"""The way in through transformers: ``model.generate(ids, custom_generate=infer.custom_generate(draft), …)``.

``model.generate`` reads the arguments, builds processors and criteria, and calls a function that decodes; here is
that function. What it is given is used as it is, nothing is built a second time. transformers drops ``streamer`` and
``tokenizer`` on the way to such a function, so what they are for is given to ``custom_generate`` itself::

    fast = infer.custom_generate(heads, tokenizer=tokenizer, stop_strings=["\\n\\n"], stream=print)
    model.generate(**inputs, custom_generate=fast, max_new_tokens=64)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from heads.grow import Budget
from heads.target import Target
from infer import drafters
from infer.arguments import check, evaluating, target_of
from infer.call import Manner, fork, generators, set_up
from infer.decode import Decoding
from infer.generation import assemble
from infer.passes import Passes
from infer.prefix import PrefixCache
from infer.processors import Prepared
from infer.stream import make_sink
from infer.verify import RULES, named

# what generate passes on beside ids, processors, criteria and config: read here, or without meaning here
PASSED_ON = frozenset(
    {"attention_mask", "position_ids", "logits_to_keep", "cache", "past_key_values", "use_cache", "synced_gpus"}
)


def custom_generate(
    draft: Any = None,
    *,
    tokenizer: Any = None,
    stop_strings: str | Sequence[str] | None = None,
    seed: int | Sequence[int] | None = None,
    stream: Any = None,
    budget: Budget | None = None,
    rule: str = "auto",
    control: Any = "fixed",
    prefix_cache: PrefixCache | None = None,
    stable: bool | int = False,
    compile: bool = False,
) -> Callable[..., Any]:
    """A decoding function for ``model.generate(custom_generate=…)``; it may be used for any number of calls.

    The call returns what ``model.generate`` would: ids, or a ``GenerateDecoderOnlyOutput`` with
    ``return_dict_in_generate`` (whose ``cache`` is None: the keys and values are not in a form to go on from).

    Args:
        draft: as in :func:`infer.generate`.
        tokenizer, stop_strings: further ends of the text, beside those ``model.generate`` knows. They are given here
            because transformers does not hand the tokenizer on.
        seed, stream, budget, rule, control, prefix_cache, stable, compile: as in :func:`infer.generate`. ``seed`` and
            ``stream`` may be given to ``model.generate`` as well, for one call.

    Raises:
        ValueError: stop strings without a tokenizer; in the call, whatever is not supported, by name.
    """
    if stop_strings is not None and tokenizer is None:
        raise ValueError("stop_strings need a tokenizer: pass tokenizer= to custom_generate")
    ends = (
        []
        if stop_strings is None
        else [StopStringCriteria(tokenizer, stop_strings if isinstance(stop_strings, str) else list(stop_strings))]
    )
    manner = Manner(budget, rule, control, prefix_cache, Passes(stable, compile))
    if rule not in ("auto", *RULES):
        named(rule, do_sample=True)  # says so
    of_all = seed, stream

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | Sequence[int] | None = None,
        stream: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        seed, stream = of_all[0] if seed is None else seed, of_all[1] if stream is None else stream
        mask = _read(model, input_ids, generation_config, model_kwargs)
        given = Prepared(generation_config, logits_processor, StoppingCriteriaList([*stopping_criteria, *ends]), mask)
        with evaluating(model):
            target = target_of(model, draft)
            drafter = drafters.make(draft, None, target)
            if manner.prefix is not None:
                manner.prefix.check(target)
            settled = manner.settled(target, drafter, input_ids[:1], None if seed is None else 0)
            texts = _texts(target, drafter, input_ids, given, settled, seed)
            with evaluating(*getattr(drafter, "modules", ())):
                _run(texts, input_ids, stream, tokenizer, settled, generation_config)
        rows = list(input_ids.split(1))
        out = assemble(texts, rows, generation_config, tokenizer)
        if not generation_config.return_dict_in_generate:
            return out.sequences
        fields: dict[str, Any] = {"sequences": out.sequences, "scores": out.scores, "logits": out.logits}
        return GenerateDecoderOnlyOutput(**fields)

    return decode


def _read(model: Any, ids: Tensor, config: GenerationConfig, kwargs: dict[str, Any]) -> Tensor:
    """The attention mask (B, n), after refusing what cannot be honoured."""
    check(config, {})
    if model.config.is_encoder_decoder:
        raise ValueError("custom_generate is for decoder-only models: use infer.generate for an encoder-decoder")
    for name, value in kwargs.items():
        if name not in PASSED_ON and value is not None and value is not False:
            raise ValueError(f"{name} is not supported by infer.custom_generate")
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if getattr(cache, "_is_user_defined", False):
        raise ValueError(
            "cache is not supported by infer.custom_generate: the target's cache is made anew by each call"
        )
    mask = kwargs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    positions = kwargs.get("position_ids")
    counted = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if positions is not None and not bool((positions.expand_as(counted) == counted)[mask.bool()].all()):
        raise ValueError("position_ids is not supported: positions follow from the prompt and its attention mask")
    return mask


def _texts(
    target: Target,
    drafter: drafters.Drafter,
    ids: Tensor,
    given: Prepared,
    manner: Manner,
    seed: int | Sequence[int] | None,
) -> list[Decoding]:
    """One text a row; ``generate`` has repeated prompts already."""
    drawn = generators(seed, len(ids), target.device)
    texts = []
    for row in range(len(ids)):
        alone = Prepared(
            given.config,
            given.processors if len(ids) == 1 else _of_row(given, row),
            given.criteria if row == 0 else StoppingCriteriaList(copy.deepcopy(each) for each in given.criteria),
            given.attention_mask[row : row + 1],
        )
        one = drafter if row == 0 else fork(drafter)
        texts.append(set_up(target, ids[row : row + 1], alone, one, manner, drawn[row]))
    return texts


def _of_row(given: Prepared, row: int) -> LogitsProcessorList:
    """The processors of one row: those built for a whole batch are cut, the rest copied, for some keep a state."""
    prompt = row // (given.config.num_return_sequences or 1)
    cut = LogitsProcessorList()
    for processor in given.processors:
        own = copy.deepcopy(processor) if row else processor
        if type(processor) in CUTS:
            own = copy.copy(processor)
            CUTS[type(processor)](own, row, prompt)
        cut.append(own)
    return cut


def _cut_repetition(processor: Any, row: int, prompt: int) -> None:
    if isinstance(processor.prompt_ignore_length, Tensor):
        processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]


def _cut_encoder_repetition(processor: Any, row: int, prompt: int) -> None:
    processor.encoder_input_ids = processor.encoder_input_ids[prompt : prompt + 1]


def _cut_encoder_ngrams(processor: Any, row: int, prompt: int) -> None:
    processor.batch_size, processor.generated_ngrams = 1, [processor.generated_ngrams[prompt]]


def _cut_allowed(processor: Any, row: int, prompt: int) -> None:
    allowed = processor._prefix_allowed_tokens_fn
    processor._num_beams = 1
    processor._prefix_allowed_tokens_fn = lambda _, ids: allowed(prompt, ids)


# processors of transformers that hold something for each row of the batch → how one row's is made of a shallow copy
CUTS: dict[type, Callable[[Any, int, int], None]] = {
    RepetitionPenaltyLogitsProcessor: _cut_repetition,
    EncoderRepetitionPenaltyLogitsProcessor: _cut_encoder_repetition,
    EncoderNoRepeatNGramLogitsProcessor: _cut_encoder_ngrams,
    PrefixConstrainedLogitsProcessor: _cut_allowed,
}


def _run(
    texts: list[Decoding], ids: Tensor, stream: Any, tokenizer: Any, manner: Manner, config: GenerationConfig
) -> None:
    def needed() -> Any:
        if tokenizer is None:
            raise ValueError("a stream of text needs a tokenizer: pass tokenizer= to custom_generate")
        return tokenizer

    sink = make_sink(stream, needed)
    if sink is not None and len(texts) > 1:
        raise ValueError(f"{len(texts)} texts cannot be streamed together: stream one at a time")
    if sink is not None:
        sink.prompt(ids)
    with manner.passes.rounds(texts, config, manner.prefix) as rounds:
        for emitted in rounds.run():
            if sink is not None:
                sink.push(emitted[0])
    if sink is not None:
        sink.end()
