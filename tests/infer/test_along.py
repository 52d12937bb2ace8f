"""Acceptance along the text, by hand: where rounds belong, loops apart, texts pooled, what people read."""

from __future__ import annotations

import pytest

from infer.along import along, lines
from infer.metrics import Round, Stats


def text(emitted: list[int], looped: tuple[int, ...] = ()) -> Stats:
    """An output whose rounds emitted so many tokens each."""
    log = [Round(4, 4, new - 1, new, looped=at in looped) for at, new in enumerate(emitted)]
    return Stats(tokens=1 + sum(emitted), log=log)


def test_rounds_belong_to_where_they_begin() -> None:
    # rounds begin at 1, 32, 63 and 64; 66; 130; 255 and 256
    rows = along([text([31, 31, 1, 2, 64, 125, 1, 3])])
    assert [(row["from"], row["to"], row["rounds"], row["tokens"]) for row in rows] == [
        (0, 64, 3, 63),
        (64, 128, 2, 66),
        (128, 256, 2, 126),
        (256, 512, 1, 3),
    ]
    assert rows[0]["tokens_per_round"] == pytest.approx(21.0) and rows[3]["tokens_per_round"] == 3.0


def test_texts_are_pooled_and_loops_left_out() -> None:
    rows = along([text([3] * 21 + [4], looped=(20, 21)), text([1, 1])])
    assert [(row["rounds"], row["tokens"]) for row in rows] == [(23, 65), (1, 4)]
    assert rows[0]["loop_free_rounds"] == 22 and rows[0]["loop_free_tokens"] == 62
    assert rows[1]["loop_free_rounds"] == 0 and rows[1]["loop_free_tokens_per_round"] is None


def test_a_text_without_rounds_has_no_stretches() -> None:
    assert along([Stats(tokens=1, log=[])]) == [] == along([])


def test_the_table_shows_stretches_where_there_are_several() -> None:
    short = {"by_output_position": along([text([2, 2])])}
    long = {"by_output_position": along([text([4] * 40, looped=(39,))])}
    assert lines({"chain 4": short}) == []
    made = lines({"chain 4": long, "tree 16": short})
    assert made[0].split() == ["τ", "loop-free", "by", "position", "rounds", "chain", "4", "tree", "16"]
    assert made[1].split() == ["0", "to", "63", "16", "4.00", "2.00"]
    assert made[3].split() == ["128", "to", "255", "7", "4.00", "-"]
