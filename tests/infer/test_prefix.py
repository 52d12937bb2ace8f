"""The store of prefixes by itself: exact ids only, bounds, threads, and when a model stops being the same model."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Phi3Config

from heads.target import Target
from infer.prefix import Hit, PrefixCache
from tests.tiny import tiny_model

LAYERS, KV_HEADS, WIDTH, TAP_WIDTH = 2, 2, 3, 4
BYTES_A_TOKEN = 8 * LAYERS * 2 * KV_HEADS * WIDTH


@pytest.fixture
def target() -> Target:
    return Target(tiny_model("llama", layers=1))


def mark(prefix: Sequence[int], *place: int) -> float:
    """A number that belongs to one prefix and place alone."""
    return float(hash((*prefix, -1, *place)) % 2**40)


def states(ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values that name the prefix they stand for."""
    marks = torch.tensor([[mark(ids[: at + 1], layer) for at in range(len(ids))] for layer in range(LAYERS)]).double()
    shape = (LAYERS, KV_HEADS, len(ids), WIDTH)
    return [(k.clone(), -k.clone()) for k in marks[:, None, :, None].expand(shape)]


def tapped(ids: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Hidden states that name prefix and index, (n, taps·H)."""
    rows = [[mark(ids[: at + 1], 99, tap) for tap in taps for _ in range(TAP_WIDTH)] for at in range(len(ids))]
    return torch.tensor(rows, dtype=torch.float64)


def put(cache: PrefixCache, target: Target, ids: Sequence[int], taps: Sequence[int] = ()) -> None:
    cache.store(target, ids, states(ids), taps, tapped(ids, taps) if taps else None)


def is_right(hit: Hit | None, ids: Sequence[int], length: int, taps: Sequence[int] = ()) -> bool:
    """Whether a hit is that prefix's state and no other's."""
    if hit is None:
        return length == 0
    right = all(
        torch.equal(ours, theirs)
        for pair, wanted in zip(hit.layers, states(ids[:length]), strict=True)
        for ours, theirs in zip(pair, wanted, strict=True)
    )
    same_taps = hit.taps is None if not taps else torch.equal(hit.taps, tapped(ids[:length], taps))  # type: ignore[arg-type]
    return hit.length == length and right and same_taps


def test_the_longest_common_beginning_is_found(target: Target) -> None:
    cache = PrefixCache()
    assert cache.lookup(target, [1, 2, 3]) is None
    put(cache, target, [1, 2, 3, 4, 5])
    put(cache, target, [1, 2, 7, 8])
    put(cache, target, [1, 2])
    for ids, length in {
        (1, 2, 3, 4, 5, 6): 5,
        (1, 2, 3, 4, 5): 4,  # the last token is always read: its pass gives the next one
        (1, 2, 3, 9, 9): 3,
        (1, 2, 7, 8, 1): 4,
        (1, 2, 8): 2,
        (1, 2): 1,
        (2, 1, 3): 0,
        (1,): 0,
    }.items():
        assert is_right(cache.lookup(target, ids), ids, length), ids
    assert cache.tokens == 5 + 2, "what texts share is held once"
    assert cache.bytes == 7 * BYTES_A_TOKEN
    assert (cache.asked, cache.reused) == (6 + 5 + 5 + 5 + 3 + 2 + 3 + 1 + 3, 5 + 4 + 3 + 4 + 2 + 1)
    cache.clear()
    assert cache.tokens == 0 and cache.lookup(target, [1, 2, 3]) is None


def test_random_texts_never_get_anothers_state(target: Target) -> None:
    """Thousands of look-ups among texts over three tokens, which share beginnings all the time."""
    rng = random.Random(0)
    cache = PrefixCache(max_tokens=60)
    found = 0
    for _ in range(1500):
        ids = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        taps = rng.choice([(), (1,), (2, 1)])
        hit = cache.lookup(target, ids, taps)
        assert is_right(hit, ids, 0 if hit is None else hit.length, taps)
        found += hit is not None
        if rng.random() < 0.5:
            put(cache, target, ids, rng.choice([(), (1,), (1, 2)]))
        assert cache.tokens <= 60
    assert found > 700


def test_taps_are_found_by_their_index(target: Target) -> None:
    cache = PrefixCache()
    put(cache, target, [1, 2, 3, 4])
    ids = [1, 2, 3, 4, 5, 6]
    assert is_right(cache.lookup(target, ids), ids, 4)
    assert cache.lookup(target, ids, (1, 2)) is None, "stored without taps: of no use to a drafter that reads them"
    put(cache, target, [1, 2, 9], (3, 1))
    assert is_right(cache.lookup(target, ids, (1, 3)), ids, 2, (1, 3)), "in the order asked for"
    assert cache.lookup(target, ids, (2,)) is None
    put(cache, target, ids[:5], (2,))
    assert is_right(cache.lookup(target, ids, (2,)), ids, 5, (2,))
    assert is_right(cache.lookup(target, ids, (1, 2)), ids, 2, (1, 2))


@pytest.mark.parametrize("bound", [{"max_tokens": 10}, {"max_bytes": 10 * BYTES_A_TOKEN + 5}])
def test_what_was_unused_for_longest_goes_first(target: Target, bound: dict[str, int]) -> None:
    cache = PrefixCache(**bound)
    first, second, third = ([at, *range(10, 13)] for at in range(3))
    for ids in (first, second):
        put(cache, target, ids)
    assert cache.lookup(target, [*first, 1]) is not None
    put(cache, target, third)
    assert is_right(cache.lookup(target, [*first, 1]), first, 4)
    assert is_right(cache.lookup(target, [*third, 1]), third, 4)
    assert cache.lookup(target, [*second, 1]) is None
    long = list(range(20, 50))
    put(cache, target, long)
    assert cache.tokens == 10 and is_right(cache.lookup(target, long), long, 10), "too long: its beginning is kept"
    assert cache.bytes <= 10 * BYTES_A_TOKEN + 5


def test_forgotten_states_are_freed(target: Target) -> None:
    """Nothing keeps the memory of a part that was dropped: pieces are copies, not views."""
    cache = PrefixCache(max_tokens=8)
    put(cache, target, list(range(100)))
    put(cache, target, [0, 1, 99])
    for node in cache._nodes():
        for tensor in (t for pair in node.layers for t in pair):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert cache.bytes == cache.tokens * BYTES_A_TOKEN


def test_what_the_caller_does_later_changes_nothing(target: Target) -> None:
    cache = PrefixCache()
    ids, given = [1, 2, 3], states([1, 2, 3])
    cache.store(target, ids, given)
    given[0][0].zero_()
    hit = cache.lookup(target, [1, 2, 3, 4])
    assert is_right(hit, ids, 3)
    assert hit is not None
    hit.layers[0][0].zero_()
    assert is_right(cache.lookup(target, [1, 2, 3, 4]), ids, 3)


def nudge_one_weight(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.data.add_(1e-3)


CHANGES: dict[str, Any] = {
    "a step of training": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3).step(),
    "weights loaded": lambda model: model.load_state_dict(tiny_model("llama", layers=1, seed=1).state_dict()),
    "weights written past torch's counter": nudge_one_weight,
    "another dtype": lambda model: model.float(),
    "another attention": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_is_another_model(change: str) -> None:
    model = tiny_model("llama", layers=1)
    cache = PrefixCache()
    put(cache, Target(model), [1, 2, 3])
    assert cache.lookup(Target(model), [1, 2, 3, 4]) is not None, "another Target around the same model"
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    CHANGES[change](model)
    assert cache.lookup(Target(model), [1, 2, 3, 4]) is None


def test_equal_weights_in_another_object_are_another_model(target: Target) -> None:
    cache = PrefixCache()
    put(cache, target, [1, 2, 3])
    other = Target(copy.deepcopy(target.model))
    assert cache.lookup(other, [1, 2, 3, 4]) is None
    put(cache, other, [1, 2, 3])
    assert cache.tokens == 6
    del other
    gc.collect()
    assert cache.tokens == 3, "states go with their model"


def test_an_adapter_switched_off_is_another_model() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(tiny_model("llama", layers=1), LoraConfig(target_modules=["q_proj"], r=2))
    target, cache = Target(model), PrefixCache()
    put(cache, target, [1, 2, 3])
    with model.disable_adapter():
        assert cache.lookup(target, [1, 2, 3, 4]) is None
        put(cache, target, [1, 2])
    assert is_right(cache.lookup(target, [1, 2, 3, 4]), [1, 2, 3], 3)


def test_many_threads(target: Target) -> None:
    cache = PrefixCache(max_tokens=100)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                ids = [rng.randrange(2) for _ in range(rng.randrange(2, 20))]
                hit = cache.lookup(target, ids, (1,))
                if not is_right(hit, ids, 0 if hit is None else hit.length, (1,)):
                    wrong.append(ids)
                put(cache, target, ids, (1,))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < cache.tokens <= 100


def test_bad_bounds_and_targets_whose_prefixes_are_not_their_own() -> None:
    for wrong in ({"max_tokens": 0}, {"max_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PrefixCache(**wrong)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = Phi3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=rope,
        original_max_position_embeddings=64,
        max_position_embeddings=512,
        pad_token_id=None,
        eos_token_id=None,
    )
    with pytest.raises(ValueError, match=r"prefix_cache is not supported.*'longrope'"):
        PrefixCache().check(Target(AutoModelForCausalLM.from_config(config)))
    PrefixCache().check(Target(tiny_model("gemma3")))
