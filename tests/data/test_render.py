"""Ids and loss masks with literal values, for templates with and without generation marks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.conversation import Refusal, Turn
from data.render import Renderer
from tests.data import toys
from tests.data.toys import chat

FOUR = chat("hi", "ok", "a", "b")
FIVE_OF_FOURTEEN = [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def turns(messages: list[dict[str, str]]) -> list[Turn]:
    return [Turn(message["role"], message["content"]) for message in messages]


def render(template: str, messages: list[dict[str, str]], **options: Any) -> tuple[str, list[int]]:
    """The text of the ids, and the mask as numbers."""
    tokenizer = toys.tokenizer(template)
    rendered = Renderer(tokenizer).render(turns(messages), **options)
    assert len(rendered.ids) == len(rendered.mask)
    return tokenizer.decode(rendered.ids), [int(bit) for bit in rendered.mask]


@pytest.mark.parametrize("template", [toys.NOGEN, toys.TAGGED, toys.PROMPTLESS])
def test_mask_with_and_without_generation_marks(template: str) -> None:
    """Literal ids and mask; a mask that covers prompts would have 14 ones here."""
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


def test_what_follows_an_end_of_turn_is_not_supervised() -> None:
    text, mask = render(toys.LINES, FOUR)
    assert text == "[U]\nhi[E]\n[A]\nok[E]\n[U]\na[E]\n[A]\nb[E]\n"
    assert mask == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]


def test_unfinished_answer_has_no_end_of_turn() -> None:
    assert render(toys.LINES, chat("a", "b"), finished=False) == ("[U]\na[E]\n[A]\nb", [0] * 7 + [1])


def test_unfinished_multi_turn_keeps_earlier_ends() -> None:
    text, mask = render(toys.NOGEN, FOUR, finished=False)
    assert (text, mask) == ("[U]hi[E][A]ok[E][U]a[E][A]b", FIVE_OF_FOURTEEN[:-1])


@pytest.mark.parametrize(("limit", "finished"), [(13, False), (14, True), (None, True)])
def test_cut_answers_are_not_finished(limit: int | None, finished: bool) -> None:
    rendered = Renderer(toys.tokenizer()).render(turns(FOUR), max_length=limit)
    assert (rendered.finished, rendered.cut) == (finished, not finished)


def test_limit_inside_the_third_prompt_keeps_two_answers() -> None:
    """Case A21."""
    text, mask = render(toys.NOGEN, [*FOUR, *chat("long question", "c")], max_length=18)
    assert text == "[U]hi[E][A]ok[E][U]a[E][A]b[E][U]lon"
    assert mask == [*FIVE_OF_FOURTEEN, 0, 0, 0, 0]


def test_one_bos_when_template_and_tokenizer_both_have_one() -> None:
    """Case A14."""
    tokenizer = toys.tokenizer(toys.BOS, bos=True)
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id
    ids = Renderer(tokenizer).render(turns(FOUR)).ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]


def test_a_merge_across_the_boundary_is_not_made() -> None:
    """Decoding starts from the prompt's own tokens: the header's line break does not melt into the answer's."""
    tokenizer = toys.tokenizer(toys.LINES, merges=[("Ċ", "Ċ")])
    rendered = Renderer(tokenizer).render(turns(chat("a", "\nb")))
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


def test_a_template_that_rewrites_earlier_answers_is_refused_by_name() -> None:
    renderer = Renderer(toys.tokenizer(toys.FORGETFUL))
    assert sum(renderer.render(turns(chat("a", "b"))).mask) == 2
    with pytest.raises(Refusal, match="renders earlier turns differently"):
        renderer.render(turns(FOUR))


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
        rendered = renderer.render(said, finished=finished)
        supervised = [id for id, bit in zip(rendered.ids, rendered.mask, strict=True) if bit]
        answers = "".join(answer + "[E]" for _, answer in pairs)
        assert tokenizer.decode(supervised) == (answers if finished else answers.removesuffix("[E]"))
        cut = renderer.render(said, finished=finished, max_length=limit)
        assert (cut.ids, cut.mask) == (rendered.ids[:limit], rendered.mask[:limit])
        assert cut.cut == (len(rendered.ids) > limit)
