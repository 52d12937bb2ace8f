"""The held-out rule: 13 words in a row, or a Jaccard index of 0.7."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.overlap import RUN, SIMILARITY, Index, closest, overlaps, runs, words
from data.split import split, wanted

THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"


def test_words() -> None:
    assert words("Don't, PANIC! 3x") == ["don", "t", "panic", "3x"]
    assert words("猫は好き cats") == ["猫", "は", "好", "き", "cats"]
    assert len(runs(THIRTEEN)) == 1


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_not() -> None:
    other = " ".join(f"filler{i}" for i in range(30))
    assert overlaps([THIRTEEN], [f"{other} {THIRTEEN} {other}"]) == [(0, 0)]
    assert overlaps([THIRTEEN], [f"{other} {THIRTEEN.removeprefix('one ')} {other}"]) == []


def test_similarity_of_seven_tenths_is_an_overlap() -> None:
    ten = "a b c d e f g h i j"
    assert overlaps([ten], ["j i h g f e d"]) == [(0, 0)]  # 7 of 10
    assert overlaps([ten], ["a b c d e f"]) == []  # 6 of 10
    assert Index([ten, "x"]).similarity("a b x").tolist() == pytest.approx([2 / 11, 1 / 3])


def test_closest_pair() -> None:
    found = closest(["a b c", "p q r s"], ["x y", "r s t p q"])
    assert (found.train, found.heldout, found.similarity, found.run) == (1, 1, 0.8, 2)
    with pytest.raises(ValueError, match="both sides"):
        closest([], ["a"])


def test_near_doubles_stay_in_training() -> None:
    prompts = ["tell me a joke", "Tell me a joke!", "name seven rivers", "explain gravity", "write verse about tea"]
    for seed in range(20):
        parts = split(prompts, 3, seed)
        assert parts.train == [0, 1]
        assert parts.heldout == [2, 3, 4]
    with pytest.raises(ValueError, match="only 3 of 5"):
        split(prompts, 4)


def test_amounts() -> None:
    assert (wanted(0.1, 50), wanted(7, 50)) == (5, 7)
    for amount in (50, 0.001, 1.5, -1):
        with pytest.raises(ValueError, match="cannot be held out"):
            wanted(amount, 50)


PROMPT = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=16).map(" ".join)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(PROMPT, min_size=4, max_size=12), st.integers(0, 3))
def test_splits_are_clean_complete_and_independent_of_order(prompts: list[str], seed: int) -> None:
    try:
        parts = split(prompts, 2, seed)
    except ValueError:
        return
    assert sorted([*parts.train, *parts.heldout]) == list(range(len(prompts)))
    train, heldout = [prompts[i] for i in parts.train], [prompts[i] for i in parts.heldout]
    assert overlaps(train, heldout) == []
    for one in heldout:
        for other in train:
            mine, theirs = set(words(one)), set(words(other))
            assert len(mine & theirs) / len(mine | theirs) < SIMILARITY
            assert not runs(one, RUN) & runs(other, RUN)
    backwards = split(prompts[::-1], 2, seed)
    assert sorted(prompts[::-1][i] for i in backwards.heldout) == sorted(heldout)
