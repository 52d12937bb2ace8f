"""What :mod:`tests.infer.random_configurations` compares: a configuration drawn from a number, and its parts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from heads.base import DraftHeads
from heads.grow import Budget
from heads.kinds import build, make_config
from heads.target import Target
from infer import drafters
from infer.drafters.draft_model import DraftModelDrafter
from infer.drafters.merge import Merged
from tests.infer.fakes import Broken, RandomTree, Wrong
from tests.infer.test_stream import TOKENIZERS
from tests.tiny import tiny_model

VOCAB = 300  # that of the byte tokenizer, and some more
# name → family and what is special about it
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "gptneox", "phi3")},
    **{name: (name, {}) for name in ("opt", "falcon", "mixtral", "qwen2moe", "qwen3moe")},
    "gemma3": ("gemma3", {"layers": 6}),
    "mistral, window 8": ("mistral", {"sliding_window": 8}),
    "qwen2, window 8 in every other layer": (
        "qwen2",
        {
            "sliding_window": 8,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "gpt2, 48 positions": ("gpt2", {"n_positions": 48}),
    "llama, 48 positions": ("llama", {"max_position_embeddings": 48}),
}
# transformers has no other attention for these; and its eager attention gives NaN for padded rows in float64
EAGER_ONLY = ("gemma2",)
DRAFTS = (
    *("none", "skilled", "wrong", "nan scores", "medusa", "eagle", "ruined eagle", "lookup", "lookup:3", "model"),
    *("layers:0-1", "layers:0,2-3", "lookup+medusa", "lookup|eagle", "medusa|model", "layers:0|lookup+eagle"),
)
SHAPES = ((0,), (1,), (0, 0), (0, 1), (1, 0), (2,), (0, 0, 0), (0, 0, 1))


@dataclass(frozen=True)
class Configuration:
    """One draw; ``settings`` are named as ``model.generate`` has them, but for what :func:`spelled` makes."""

    number: int
    model: str
    attention: str
    weights: int
    prompts: tuple[tuple[int, ...], ...]
    draft: str
    budget: Budget | None
    way: str
    settings: dict[str, Any]
    controlled: bool

    @property
    def ragged(self) -> bool:
        """Whether prompts differ in length."""
        return len({len(prompt) for prompt in self.prompts}) > 1

    @property
    def limit(self) -> int | None:
        """Positions, where there are few."""
        return 48 if "48" in self.model else None


def draw(number: int) -> Configuration:
    """The configuration of a number."""
    rng = random.Random(number)
    model = rng.choice(list(MODELS))
    # few different tokens, so that texts repeat themselves and lookup finds something
    rows = rng.choice((1, 1, 2, 3))
    lengths = [rng.choice((1, 2, 5, 9, 14, 20)) for _ in range(rows)]
    attention = rng.choice(("sdpa", "eager"))
    if model in EAGER_ONLY:
        attention, lengths = "eager", lengths[:1] * rows
    prompts = tuple(tuple(rng.choice((5, 7, 9, *range(1, 60))) for _ in range(length)) for length in lengths)
    budget = rng.choice(
        (
            None,
            Budget.chain(rng.randint(1, 6)),
            Budget(rng.randint(2, 14), rng.randint(1, 4), rng.randint(2, 4)),
            Budget.static(SHAPES),
        )
    )
    draft = rng.choice(DRAFTS)
    if "medusa" in draft and budget is not None:
        budget = budget.within(3)
    way = rng.choice(("generate", "generate", "generate", "custom", "prefix", "stream" if rows == 1 else "generate"))
    configuration = Configuration(
        number=number,
        model=model,
        attention=attention,
        weights=rng.randrange(3),
        prompts=prompts,
        draft=draft,
        budget=budget,
        way=way,
        settings={},
        controlled=random.Random(f"control {number}").random() < 0.4,
    )
    configuration.settings.update(_settings(rng, configuration))
    return configuration


def _settings(rng: random.Random, c: Configuration) -> dict[str, Any]:
    longest, rows = max(map(len, c.prompts)), len(c.prompts)
    some = lambda: rng.randrange(1, VOCAB)  # noqa: E731
    chances: dict[str, tuple[float, Any]] = {
        "repetition_penalty": (0.25, rng.choice((1.3, 0.8, 2.0))),
        "frequency": (0.1, rng.choice((0.5, 2.0))),
        "alternating": (0.1, True),
        "no_repeat_ngram_size": (0.15, rng.randint(1, 3)),
        "encoder_repetition_penalty": (0.08, 1.4),
        "encoder_no_repeat_ngram_size": (0.08, 2),
        "bad_words_ids": (0.1, [[some()], [5, 7], [some(), some()]]),
        "sequence_bias": (0.1, {(5,): -2.0, (7, 9): 6.0, (some(),): 4.0}),
        "suppress_tokens": (0.1, [some(), some()]),
        "begin_suppress_tokens": (0.1, [some(), 5]),
        "allowed": (0.08, True),
        "forced_eos_token_id": (0.05, 11),
        "remove_invalid_values": (0.05, True),
        "renormalize_logits": (0.08, True),
        "eos_token_id": (0.5, sorted(rng.sample(range(1, VOCAB), rng.choice((1, 8, 40))))),
        "stop_strings": (0.1, rng.choice((["a", "qu"], ["\n"], ["zz", "e"]))),
        "criterion": (0.12, rng.randint(3, 20)),
        "output": (0.3, True),
    }
    settings = {name: value for name, (chance, value) in chances.items() if rng.random() < chance}
    if "eos_token_id" in settings:
        more: dict[str, tuple[float, Any]] = {
            "min_new_tokens": (0.3, rng.randint(1, 8)),
            "min_length": (0.1, longest + rng.randint(1, 5)),
        }
        more["exponential_decay_length_penalty"] = (0.1, (2, 1.3))
        settings |= {name: value for name, (chance, value) in more.items() if rng.random() < chance}
    if rows > 1 and settings.keys() & {"stop_strings", "criterion"}:
        # without an end-of-sequence id transformers goes on with rows that a criterion has ended
        settings.setdefault("eos_token_id", [11])
    if "forced_eos_token_id" in settings:
        settings.setdefault("eos_token_id", [11])
    sampling = rng.random()
    if sampling < 0.2:
        settings |= {"do_sample": True, "top_k": 1, "temperature": rng.choice((0.5, 1.0, 2.0))}
        if rng.random() < 0.3 and c.way != "stream":
            settings["num_return_sequences"] = 2
    elif sampling < 0.35 and rows == 1 and c.way in ("generate", "prefix"):
        warpers: tuple[dict[str, Any], ...] = (
            {"top_p": 0.8},
            {"top_k": 7},
            {"min_p": 0.1},
            {"typical_p": 0.7},
            {"epsilon_cutoff": 0.02},
            {},
        )
        settings |= {"do_sample": True, "temperature": rng.choice((0.7, 1.5))} | {"top_k": 0} | rng.choice(warpers)
    else:
        settings["do_sample"] = False
    new = rng.choice((1, 2, 6, 13, 22))
    if c.limit:
        new = min(rng.choice((new, 48)), c.limit - longest)
    if rng.random() < 0.5:
        return settings | {"max_new_tokens": new}
    return settings | {"max_length": longest + new}


class Frequency(LogitsProcessor):
    """Frequency and presence penalty, as servers have them: a user's processor without a state."""

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - self.penalty * counts - 0.3 * (counts > 0)


class Alternating(LogitsProcessor):
    """A user's processor with a state: every call bans other tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        banned = (torch.arange(scores.shape[-1]) + self.calls) % 3 == 0
        return scores.masked_fill(banned, float("-inf"))


class Ends(StoppingCriteria):
    """Ends a text at a multiple of a number."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % self.divisor == 1


def spelled(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as arguments, with fresh processors and criteria."""
    plain = {**settings, "pad_token_id": 0}
    processors: list[LogitsProcessor] = []
    if plain.pop("alternating", False):
        processors.append(Alternating())
    if penalty := plain.pop("frequency", None):
        processors.append(Frequency(penalty))
    if processors:
        plain["logits_processor"] = processors
    if divisor := plain.pop("criterion", None):
        plain["stopping_criteria"] = [Ends(divisor)]
    if plain.pop("allowed", False):
        plain["prefix_allowed_tokens_fn"] = lambda row, ids: [(int(ids[-1]) * 3 + k + row) % VOCAB for k in range(9)]
    if "stop_strings" in plain:
        plain["tokenizer"] = TOKENIZERS["bytes"]
    if plain.pop("output", False):
        plain |= {"output_scores": True, "output_logits": True}
    return plain


@cache
def model_of(name: str, attention: str, weights: int) -> Any:
    """Built once, used by many."""
    family, overrides = MODELS[name]
    return tiny_model(family, vocab=VOCAB, seed=weights, attention=attention, **overrides)


@cache
def heads_of(name: str, attention: str, weights: int, kind: str, ruined: bool = False) -> DraftHeads:
    """Random heads; ruined ones say NaN."""
    target = Target(model_of(name, attention, weights))
    taps = None if kind == "medusa" else (1, 2, 3)
    heads = build(make_config(kind, target, lookahead=3, taps=taps), target).double()
    generator = torch.Generator().manual_seed(weights)
    for parameter in heads.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
        if ruined:
            parameter.data.fill_(float("nan"))
    return heads


def drafter_of(c: Configuration, answer: list[int]) -> Any:
    """What the configuration calls its draft."""
    key = c.model, c.attention, c.weights
    fakes: dict[str, Any] = {
        "skilled": lambda: RandomTree(answer, seed=c.number, vocab=VOCAB),
        "wrong": lambda: Wrong(answer),
        "nan scores": lambda: Broken(answer, seed=c.number, vocab=VOCAB),
        "model": lambda: DraftModelDrafter(model_of("llama, tied", "sdpa", c.weights)),
        "ruined eagle": lambda: heads_of(*key, "eagle", True),
    }
    if c.draft in fakes:
        return fakes[c.draft]()
    kind = next((kind for kind in ("medusa", "eagle") if kind in c.draft), None)
    heads = heads_of(*key, kind) if kind else None
    target = heads.target if heads is not None else Target(model_of(*key))
    if "model" in c.draft:
        return Merged([drafters.make("heads", heads, target), fakes["model"]()], ["heads", "model"])
    return drafters.make(c.draft if kind is None else c.draft.replace(kind, "heads"), heads, target)


def padded(prompts: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    """(B, n) ids padded on the left with 0, and their mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    return ids, torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
