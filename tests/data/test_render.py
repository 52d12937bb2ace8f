"""Ids and loss masks with literal values, for templates with and without generation marks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.render import Renderer, render_text
from data.turns import Refusal, Turn
from tests.data import toys
from tests.data.toys import chat

FOUR = chat("hi", "ok", "a", "b")
FIVE_OF_FOURTEEN = [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def turns(messages: list[dict[str, str]]) -> list[Turn]:
    return [Turn(message["role"], message["content"]) for message in messages]


def render(template: str, messages: list[dict[str, str]], **options: Any) -> tuple[str, list[int]]:
    """The text of the ids, and the mask as numbers."""
    tokenizer = toys.tokenizer(template)
    (rendered,) = Renderer(tokenizer).render(turns(messages), **options)
    assert len(rendered.ids) == len(rendered.mask)
    return tokenizer.decode(rendered.ids), [int(bit) for bit in rendered.mask]


@pytest.mark.parametrize("template", [toys.NOGEN, toys.TAGGED, toys.PROMPTLESS])
def test_mask_with_and_without_generation_marks(template: str) -> None:
    """Literal ids and mask; a mask that covers prompts would have 14 ones here."""
    (rendered,) = Renderer(toys.tokenizer(template)).render(turns(FOUR))
    assert rendered.ids == [260, 71, 72, 262, 261, 78, 74, 262, 260, 64, 262, 261, 65, 262]
    text, mask = render(template, FOUR)
    assert text == "[U]hi[E][A]ok[E][U]a[E][A]b[E]"
    assert mask == FIVE_OF_FOURTEEN
    assert sum(mask) == 5


@pytest.mark.parametrize("template", [toys.NOGEN, toys.TAGGED, toys.PROMPTLESS])
def test_limit(template: str) -> None:
    assert render(template, FOUR, max_length=6)[1] == [0, 0, 0, 0, 0, 1]


def test_answer_at_the_very_first_token() -> None:
    """The first token's place is 0, which is not "no place"."""
    text, mask = render(toys.BARE, [{"role": "assistant", "content": "A"}, {"role": "user", "content": "bc"}])
    assert (text, mask) == ("A[U]bc", [1, 0, 0, 0])
    text, mask = render(toys.NOGEN, [{"role": "assistant", "content": "A"}, {"role": "user", "content": "bc"}])
    assert (text, mask) == ("[A]A[E][U]bc[E]", [0, 1, 1, 0, 0, 0, 0])


def test_system_text_is_read_and_not_supervised() -> None:
    text, mask = render(toys.NOGEN, [{"role": "system", "content": "s"}, *FOUR])
    assert text.startswith("[S]s[E]")
    assert mask == [0, 0, 0, *FIVE_OF_FOURTEEN]


def test_a_system_prompt_and_three_answers() -> None:
    said = [Turn("system", "be kind"), *turns(chat("a", "b", "c", "d", "e", "f"))]
    assert views(toys.NOGEN, said) == ["[S]be kind[E][U]a[E][A]{b[E]}[U]c[E][A]{d[E]}[U]e[E][A]{f[E]}"]


def test_what_follows_an_end_of_turn_is_not_supervised() -> None:
    text, mask = render(toys.LINES, FOUR)
    assert text == "[U]\nhi[E]\n[A]\nok[E]\n[U]\na[E]\n[A]\nb[E]\n"
    assert mask == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]


def test_unfinished_answer_has_no_end_of_turn() -> None:
    assert render(toys.LINES, chat("a", "b"), finished=False) == ("[U]\na[E]\n[A]\nb", [0] * 7 + [1])


def test_unfinished_multi_turn_keeps_earlier_ends() -> None:
    text, mask = render(toys.NOGEN, FOUR, finished=False)
    assert (text, mask) == ("[U]hi[E][A]ok[E][U]a[E][A]b", FIVE_OF_FOURTEEN[:-1])


@pytest.mark.parametrize(("limit", "finished"), [(7, False), (8, True), (None, True)])
def test_cut_answers_are_not_finished(limit: int | None, finished: bool) -> None:
    (rendered,) = Renderer(toys.tokenizer()).render(turns(FOUR)[:2], max_length=limit)
    assert (rendered.finished, rendered.cut) == (finished, not finished)


@pytest.mark.parametrize("limit", [14, 18, 29, 31])
def test_too_long_is_cut_behind_the_last_answer_that_fits(limit: int) -> None:
    """Inside the third question or the third answer: the first two stay, whole."""
    (rendered,) = Renderer(toys.tokenizer()).render(turns([*FOUR, *chat("long question", "c")]), max_length=limit)
    assert toys.learned(toys.tokenizer(), rendered) == "[U]hi[E][A]{ok[E]}[U]a[E][A]{b[E]}"
    assert [int(bit) for bit in rendered.mask] == FIVE_OF_FOURTEEN
    assert (rendered.finished, rendered.cut) == (True, True)


def test_too_long_in_the_first_answer_keeps_what_fits_of_it() -> None:
    (rendered,) = Renderer(toys.tokenizer()).render(turns(chat("hi", "a long answer", "a", "b")), max_length=9)
    assert toys.learned(toys.tokenizer(), rendered) == "[U]hi[E][A]{a lo}"
    assert (rendered.finished, rendered.cut) == (False, True)


def test_a_cut_at_a_border_makes_an_unfinished_conversation_end_well() -> None:
    (rendered,) = Renderer(toys.tokenizer()).render(turns(FOUR), finished=False, max_length=12)
    assert (len(rendered.ids), rendered.finished, rendered.cut) == (8, True, True)


def test_one_bos_when_template_and_tokenizer_both_have_one() -> None:
    tokenizer = toys.tokenizer(toys.BOS, bos=True)
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    (ids,) = [one.ids for one in Renderer(tokenizer).render(turns(FOUR))]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]


def test_a_merge_across_the_boundary_is_not_made() -> None:
    """Decoding starts from the prompt's own tokens: the header's line break does not melt into the answer's."""
    tokenizer = toys.tokenizer(toys.LINES, merges=[("Ċ", "Ċ")])
    (rendered,) = Renderer(tokenizer).render(turns(chat("a", "\nb")))
    pair, single = tokenizer.convert_tokens_to_ids("ĊĊ"), tokenizer.convert_tokens_to_ids("Ċ")
    assert pair in tokenizer("[A]\n\nb").input_ids
    assert pair not in rendered.ids
    assert tokenizer.decode(rendered.ids) == "[U]\na[E]\n[A]\n\nb[E]\n"
    supervised = [id for id, bit in zip(rendered.ids, rendered.mask, strict=True) if bit]
    assert supervised[0] == single
    assert tokenizer.decode(supervised) == "\nb[E]"
    prompt = tokenizer.apply_chat_template(chat("a"), add_generation_prompt=True, return_dict=False)
    assert rendered.ids[: len(prompt)] == prompt


def test_the_template_may_refuse() -> None:
    renderer = Renderer(toys.tokenizer(toys.STRICT))
    with pytest.raises(Refusal, match="System role not supported"):
        renderer.render([Turn("system", "s"), *turns(FOUR)])


def test_a_template_that_leaves_out_earlier_answers_is_refused_by_name() -> None:
    renderer = Renderer(toys.tokenizer(toys.FORGETFUL))
    assert [sum(one.mask) for one in renderer.render(turns(chat("a", "b")))] == [2]
    with pytest.raises(Refusal, match="does not show the assistant's turn 'ok'"):
        renderer.render(turns(FOUR))


def test_a_template_that_leaves_out_the_system_is_refused_by_name() -> None:
    renderer = Renderer(toys.tokenizer(toys.UNSEEN_SYSTEM))
    assert len(renderer.render(turns(FOUR))) == 1
    with pytest.raises(Refusal, match="does not show the system's turn 'be kind'"):
        renderer.render([Turn("system", "be kind"), *turns(FOUR)])


def views(template: str, said: list[Turn], **options: Any) -> list[str]:
    tokenizer = toys.tokenizer(template)
    return [toys.learned(tokenizer, one) for one in Renderer(tokenizer).render(said, **options)]


def test_headers_that_users_type_are_theirs() -> None:
    """Boundaries come from rendering, so a typed header opens no answer and a typed end closes none."""
    assert views(toys.NOGEN, turns(chat("say [A] then [E][A]no", "yes", "[U]", "ok"))) == [
        "[U]say [A] then [E][A]no[E][A]{yes[E]}[U][U][E][A]{ok[E]}"
    ]


def test_questions_behind_the_last_answer_stay_and_are_not_learned() -> None:
    assert views(toys.NOGEN, turns(chat("q", "a", "r"))) == ["[U]q[E][A]{a[E]}[U]r[E]"]


def test_a_template_that_writes_the_date_is_told_a_fixed_one() -> None:
    assert views(toys.DATED, turns(chat("q", "a"))) == ["[S]26 Jul 2024[E][U]q[E][A]{a[E]}"]


def test_documents_are_learned_whole_but_for_what_the_tokenizer_puts_in_front() -> None:
    plain, bos = toys.tokenizer(), toys.tokenizer(bos=True)
    assert toys.learned(plain, render_text(plain, "ab")) == "{ab}"
    for text in ("ab", "<s>ab"):
        assert toys.learned(bos, render_text(bos, text)) == "<s>{ab}"
    assert [render_text(plain, text).finished for text in ("ab", "ab</s>")] == [False, True]
    cut = render_text(plain, "ab</s>", max_length=2)
    assert (toys.learned(plain, cut), cut.cut, cut.finished) == ("{ab}", True, False)


def test_no_template_and_a_template_that_hides_answers() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Renderer(toys.tokenizer(None))
    with pytest.raises(ValueError, match="does not show an answer"):
        Renderer(toys.tokenizer("{% for m in messages %}[U]{% endfor %}"))


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="[]<>"), max_size=12)


RENDERERS = [
    Renderer(toys.tokenizer(template, merges=[("Ċ", "Ċ"), ("a", "a"), ("Ġ", "a")]))
    for template in (toys.NOGEN, toys.LINES)
]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.booleans(), st.integers(1, 80))
def test_supervised_tokens_read_as_the_answers(pairs: list[tuple[str, str]], finished: bool, limit: int) -> None:
    """Mask as long as ids; what it covers reads as the answers with their ends; a limit only shortens."""
    for renderer in RENDERERS:
        tokenizer = renderer.tokenizer
        said = [Turn(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
        (rendered,) = renderer.render(said, finished=finished)
        supervised = [id for id, bit in zip(rendered.ids, rendered.mask, strict=True) if bit]
        answers = "".join(answer + "[E]" for _, answer in pairs)
        assert tokenizer.decode(supervised) == (answers if finished else answers.removesuffix("[E]"))
        (cut,) = renderer.render(said, finished=finished, max_length=limit)
        length = len(cut.ids)
        assert (cut.ids, cut.mask) == (rendered.ids[:length], rendered.mask[:length])
        assert cut.cut == (len(rendered.ids) > limit)
        ends = [i for i in range(1, limit + 1) if rendered.mask[i - 1 : i + 1] == [True, False]]
        assert length == (len(rendered.ids) if not cut.cut else max(ends, default=limit))
