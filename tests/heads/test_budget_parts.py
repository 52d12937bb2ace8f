"""Budgets of several drafters at once: split, cut to fewer rows, made shallower."""

from __future__ import annotations

from heads.grow import NOTHING, Budget


def test_a_budget_for_each_of_several_drafters() -> None:
    both = Budget.split([Budget.chain(4), Budget(rows=8, depth=2, width=3)])
    assert (both.rows, both.depth, both.width) == (12, 4, 3)  # the root is one row of all
    assert both.within(3).parts == (Budget.chain(3), Budget(rows=8, depth=2, width=3))
    assert both.within(1).parts == (Budget.chain(1), Budget(rows=8, depth=1, width=3))
    assert both.fit(6).parts == (Budget.chain(4), Budget(rows=2, depth=1, width=3)) and both.fit(6).rows == 6
    assert both.fit(3).parts == (Budget.chain(2), Budget(rows=1, depth=0, width=3)) and both.fit(3).rows == 3
    assert both.fit(12) is both and both.within(4) is both
    one = Budget.split([Budget.chain(4), NOTHING])
    assert (one.rows, one.depth, one.width) == (5, 4, 1)
    assert Budget.split([Budget.chain(1), Budget.chain(2)]).width == 2  # two chains are a tree
    none = Budget.split([NOTHING, NOTHING])
    assert (none.rows, none.depth, none.width) == (1, 0, 1)
