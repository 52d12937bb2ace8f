"""The calls users make: ``generate`` and ``stream``. Same text as ``model.generate``, fewer passes of the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import GenerationConfig

from heads.grow import Budget
from infer.call import Call, Manner
from infer.generation import Generation
from infer.passes import Passes
from infer.prefix import PrefixCache
from infer.stream import TextPieces

__all__ = ["Generation", "generate", "stream"]


def generate(
    model: Any,
    prompt: Any,
    draft: Any = None,
    tokenizer: Any = None,
    generation_config: GenerationConfig | None = None,
    seed: int | Sequence[int] | None = None,
    stream: Any = None,
    *,
    budget: Budget | None = None,
    rule: str = "auto",
    control: Any = "fixed",
    prefix_cache: PrefixCache | None = None,
    stable: bool | int = False,
    compile: bool = False,
    **generation_kwargs: Any,
) -> Generation:
    """Decode one prompt or several; the output is the target's own, whatever the draft.

    Greedy text equals that of ``model.generate``; sampled text has exactly its law.

    Args:
        model: a transformers model, a ``heads.Target``, or a heads repository (path or Hub id), whose target is
            loaded and whose heads draft.
        prompt: text, chat messages, a list of either, or token ids (B, n), with ``attention_mask=`` for left padding.
            Each text of several is decoded as it would be alone.
        draft: heads, a drafter (``infer.drafters.Drafter``), or a spec string such as ``"lookup+heads"``
            (:mod:`infer.drafters.specs`). None: the heads that came with the model, or no draft.
        tokenizer: for text in and out; the target's own where its name leads to it.
        generation_config, generation_kwargs: as for ``model.generate``.
        seed: of everything drawn in this call; torch's global generator otherwise. One number counts on from the first
            text; a list gives each text its own.
        stream: called with each piece of new text, or a streamer of transformers.
        budget: size and shape of drafts; a chain as long as the drafter's look-ahead by default.
        rule: acceptance rule (``infer.verify.RULES``); ``"auto"`` takes the best for each draft.
        control: ``"fixed"``: drafts are as large as ``budget`` allows; ``"auto"``: as large as pays on this machine,
            none where none does (``infer.control``; costs are measured once and stored); or a control of your own.
        prefix_cache: beginnings of texts read by earlier calls, which are not read again.
        stable: the text is the same whatever the draft, in half precision too (:mod:`infer.stable`): every pass after
            the prefill has 8 rows, or so many as are named here, and drafts are shortened to fit.
        compile: run passes through ``torch.compile`` (:mod:`infer.compiled`), in a static cache and with as many rows
            as ``budget`` or ``stable`` names; ``compile_config=`` says how. One text a call.

    Raises:
        ValueError: an argument that is unknown, wrong or not supported; its name and the reason are given.
    """
    manner = Manner(budget, rule, control, prefix_cache, Passes(stable, compile))
    call = Call(model, prompt, draft, tokenizer, generation_config, seed, stream, manner, generation_kwargs)
    for _ in call.run():
        pass
    return call.result()


def stream(
    model: Any,
    prompt: Any,
    draft: Any = None,
    tokenizer: Any = None,
    generation_config: GenerationConfig | None = None,
    seed: int | Sequence[int] | None = None,
    *,
    budget: Budget | None = None,
    rule: str = "auto",
    control: Any = "fixed",
    prefix_cache: PrefixCache | None = None,
    stable: bool | int = False,
    compile: bool = False,
    **generation_kwargs: Any,
) -> Iterator[str]:
    """Decode one prompt and yield pieces of the new text as they come; joined, they are the whole text.

    Arguments and errors as for :func:`generate`; wrong arguments raise here, before the first piece is asked for.
    """
    manner = Manner(budget, rule, control, prefix_cache, Passes(stable, compile))
    call = Call(model, prompt, draft, tokenizer, generation_config, seed, None, manner, generation_kwargs)
    if len(call.texts) > 1:
        raise ValueError(f"{len(call.texts)} texts cannot be streamed together: stream one at a time")
    return _pieces(call, TextPieces(call.need_tokenizer()))


def _pieces(call: Call, text: TextPieces) -> Iterator[str]:
    for (tokens,) in call.run():
        piece = text.push(tokens)
        if piece:
            yield piece
    rest = text.rest()
    if rest:
        yield rest
