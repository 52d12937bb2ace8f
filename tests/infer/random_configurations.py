"""Random configurations of everything at once, each compared with ``model.generate`` in float64.

    python -m tests.infer.random_configurations --count 1000          all of them, a few minutes on one core
    python -m tests.infer.random_configurations --first 417 --count 1  one again

Family, weights, attention, prompts and their padding, drafter, draft shape, rule, processors, stops and the way in are
drawn from the number alone. Greedy text (and text sampled among one token) must be the same, token by token, and so
must scores and logits where they are asked for. Where there is a choice in sampling, the text is our own, and the
processed scores at each of its places are compared with what transformers' processors, as ``model.generate`` builds
them, make of a plain forward pass over it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import infer
from heads.base import DraftHeads
from infer import controls
from infer.drafters import HeadsDrafter
from infer.lookahead import CostTable
from infer.metrics import Stats
from infer.stream import TextPieces, decode
from tests.infer.configurations import Configuration, drafter_of, draw, model_of, padded, spelled
from tests.infer.test_stream import TOKENIZERS

COSTS = CostTable(
    rows={1: 1.0, 2: 1.02, 8: 1.1, 16: 1.3, 64: 2.0},
    drafts={(1, 1): 0.1, (4, 1): 0.3, (1, 8): 0.1, (4, 8): 0.4},
    context=1,
)
PREFIXES = infer.PrefixCache(max_tokens=4000)


def compare(c: Configuration) -> str | None:
    """What differs from ``model.generate``, in words; None when nothing does."""
    model = model_of(c.model, c.attention, c.weights)
    ids, mask = padded(c.prompts)
    if c.settings.get("do_sample") and c.settings["top_k"] != 1:
        return _compare_sampled(c, model, ids)
    asked = spelled(c.settings) | {"attention_mask": mask}
    # transformers' eager attention gives NaN for padded rows in float64 (test_transformers_own shows it)
    reference = model_of(c.model, "sdpa", c.weights) if c.ragged else model
    theirs = reference.generate(ids, return_dict_in_generate=True, **asked)
    first = theirs.sequences[0, ids.shape[1] - len(c.prompts[0]) :].tolist()
    for run in range(2 if c.way == "prefix" else 1):
        sequences, scores, logits, counts = _ours(c, model, ids, drafter_of(c, first), run)
        if not torch.equal(sequences, theirs.sequences):
            return f"tokens: {sequences.tolist()} where model.generate has {theirs.sequences.tolist()}"
        for name, mine, wanted in (("scores", scores, theirs.scores), ("logits", logits, theirs.logits)):
            problem = _unlike(mine, wanted, counts)
            if problem:
                return f"{name} {problem}"
    return None


def _ours(c: Configuration, model: Any, ids: Tensor, drafter: Any, run: int) -> tuple[Tensor, Any, Any, list[int]]:
    """Sequences, scores, logits, and how many tokens each row has."""
    asked = spelled(c.settings) | {"attention_mask": (ids != 0).long()}
    own: dict[str, Any] = {"budget": c.budget, "seed": c.number, "control": _control(c, drafter)}
    if c.way == "custom":
        strings = {name: asked.pop(name) for name in ("tokenizer", "stop_strings") if name in asked}
        fast = infer.custom_generate(drafter, **own, **strings)
        out = model.generate(ids, custom_generate=fast, return_dict_in_generate=True, **asked)
        return out.sequences, None, None, []
    if c.way == "stream":
        return _streamed(c, model, ids, drafter, asked | own), None, None, []
    if c.way == "prefix":
        own["prefix_cache"] = PREFIXES
    out = infer.generate(model, ids, drafter, **asked, **own)
    if c.way == "prefix" and run and any(stats.reused != int(row.sum()) - 1 for stats, row in _rows(out, asked)):
        raise AssertionError("a prompt just read was read again")
    return out.sequences, out.scores, out.logits, [stats.tokens for stats in out.row_stats]


def _control(c: Configuration, drafter: Any) -> Any:
    """Look-ahead control by costs that make it go through depths, widths and plain rounds."""
    made = HeadsDrafter(drafter) if isinstance(drafter, DraftHeads) else drafter
    return controls.choose(made, COSTS, c.budget) if c.controlled else None


def _rows(out: infer.Generation, asked: dict[str, Any]) -> Iterator[tuple[Stats, Tensor]]:
    mask = asked["attention_mask"].repeat_interleave(asked.get("num_return_sequences", 1), 0)
    return zip(out.row_stats, mask, strict=True)


def _streamed(c: Configuration, model: Any, ids: Tensor, drafter: Any, asked: dict[str, Any]) -> Tensor:
    """Ids that a streamer got; the pieces of text must be those of the ids."""
    tokenizer, got = TOKENIZERS["bytes"], []

    class Streamer:
        def put(self, value: Tensor) -> None:
            got.extend(value.flatten().tolist())

        def end(self) -> None:
            pass

    out = infer.generate(model, ids, drafter, stream=Streamer(), **asked)
    pieces = TextPieces(tokenizer)
    new = got[ids.shape[1] :]
    text = "".join(pieces.push([token]) for token in new) + pieces.rest()
    if got != out.sequences[0].tolist() or text != decode(tokenizer, new):
        raise AssertionError("the stream is not the text")
    return out.sequences


def _unlike(mine: Any, wanted: Any, counts: list[int]) -> str | None:
    """Where (B, V) tensors by place differ in rows that have not ended."""
    if mine is None or wanted is None:
        return None
    if len(mine) != len(wanted):
        return f"of {len(mine)} places, not {len(wanted)}"
    for place, (a, b) in enumerate(zip(mine, wanted, strict=True)):
        for row, count in enumerate(counts):
            if place < count and not torch.allclose(a[row], b[row], rtol=1e-4, atol=1e-4):
                return (
                    f"of place {place} in row {row} differ by {float((a[row] - b[row]).abs().nan_to_num(0).max()):.3g}"
                )
    return None


def _compare_sampled(c: Configuration, model: Any, ids: Tensor) -> str | None:
    """Our own sampled text: is the law at each of its places that of transformers?"""
    asked = spelled(c.settings) | {"output_scores": True}
    drafter = drafter_of(c, ids[0].tolist())
    own: dict[str, Any] = {"budget": c.budget, "seed": c.number, "control": _control(c, drafter)}
    out = infer.generate(model, ids, drafter, **asked, **own)
    new = out.sequences[0, ids.shape[1] :].tolist()
    built: dict[str, Any] = {}

    def look(model: Any, input_ids: Tensor, logits_processor: Any, **kwargs: Any) -> Tensor:
        built["processors"] = logits_processor
        return input_ids

    model.generate(ids, custom_generate=look, **(spelled(c.settings) | {"stop_strings": None}))
    with torch.no_grad():
        logits = model(out.sequences).logits[0, ids.shape[1] - 1 : -1].float()
    assert out.scores is not None
    for place, token in enumerate(new):
        expected = built["processors"](out.sequences[:, : ids.shape[1] + place], logits[place : place + 1].clone())[0]
        problem = _unlike([out.scores[place]], [expected[None]], [1])
        if problem or not torch.isfinite(out.scores[place][0, token]):
            return f"the law at place {place} of a sampled text: {problem or 'an impossible token'}"
    return None


def main(argv: list[str] | None = None) -> int:
    """Compare, and say what differed; 1 when anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    started, different = time.perf_counter(), 0
    seen: dict[str, Counter[str]] = {name: Counter() for name in ("model", "draft", "way", "rows")}
    for number in range(args.first, args.first + args.count):
        c = draw(number)
        for name, value in (("model", c.model), ("draft", c.draft), ("way", c.way), ("rows", str(len(c.prompts)))):
            seen[name][value] += 1
        try:
            problem = compare(c)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            different += 1
            print(f"{c}\n    {problem}", flush=True)
    for name, counts in seen.items():
        print(f"{name}: " + ", ".join(f"{value} {count}" for value, count in sorted(counts.items())))
    print(f"{args.count} configurations, {different} differ, {time.perf_counter() - started:.0f} s")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
