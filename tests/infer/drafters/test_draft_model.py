"""A draft model: exact text whatever it is, a cache that is always the text's, and vocabularies that must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig

from heads.grow import Budget, Sampler
from heads.target import Target
from infer.decode import Decoding
from infer.drafters.draft_model import DraftModelDrafter
from infer.drafters.vocabulary import check_vocabularies
from infer.stopping import Stop
from tests.data.toys import tokenizer
from tests.infer.drafters.common import BUDGETS, NEW, PROMPT, Checked, cousin, decode, plain, target_of
from tests.tiny import FAMILIES, tiny_model


def checked(model: Any) -> Checked:
    """A drafter whose every node is compared with an uncached pass of the draft model."""
    drafter = DraftModelDrafter(model)
    return Checked(drafter, lambda ids: drafter.model.forward(ids).logits[0, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_targets(family: str) -> None:
    target, drafter = target_of(family), DraftModelDrafter(cousin(family))
    for budget in BUDGETS.values():
        out = decode(target, drafter, budget)
        assert out.sequences[0].tolist() == plain(target)
        assert 0 < out.stats.accepted < out.stats.proposed, "some drafts stand and some fall"


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_each_node_is_drafted_from_its_own_prefix(family: str, budget: Budget) -> None:
    """Whatever was accepted before: so the cache is the text's, compacted and complete, in every round."""
    target, drafter = target_of(family), checked(cousin(family))
    out = decode(target, drafter, budget)
    assert out.sequences[0].tolist() == plain(target)
    assert len(drafter.drafts) > 3


def test_a_model_of_another_family_drafts() -> None:
    target = target_of("llama")
    out = decode(target, checked(tiny_model("gpt2", layers=2, seed=5)), BUDGETS["dynamic tree"])
    assert out.sequences[0].tolist() == plain(target)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_target_as_its_own_draft_is_always_right(depth: int) -> None:
    """All accepted, round after round: the last drafted token, which no pass has read, must enter the cache too."""
    target = target_of("llama")
    stats = decode(target, DraftModelDrafter(target), Budget.chain(depth), 1 + 4 * (depth + 1)).stats
    assert [(r.accepted, r.emitted) for r in stats.log] == [(depth, depth + 1)] * 4


def test_sampled_drafts_carry_what_they_were_drawn_from() -> None:
    target, drafter = target_of("llama"), checked(cousin("llama"))
    out = decode(target, drafter, Budget.chain(3), do_sample=True, temperature=0.8, top_k=0, seed=4)
    assert 0 < out.stats.accepted < out.stats.proposed
    assert all(q is not None for draft in drafter.drafts for q in draft.q)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("shape", ["chain", "static tree"])
def test_a_draft_model_with_fewer_positions_stops_drafting(family: str, shape: str) -> None:
    """Drafts end one behind its last position, as their last token is not read; from there on decoding is plain."""
    target, positions = target_of(family), 18
    names: dict[str, Any] = {"n_positions" if family == "gpt2" else "max_position_embeddings": positions}
    model = tiny_model(family, **names)
    out = decode(target, checked(model), BUDGETS[shape])
    assert out.sequences[0].tolist() == plain(target)
    length, depths = PROMPT.shape[1] + 1, []
    for done in out.stats.log:
        room = PROMPT.shape[1] + NEW - length - 1
        depths.append((done.depth, max(0, min(3, positions + 1 - length, room))))
        length += done.emitted
    assert all(depth == expected for depth, expected in depths)
    assert depths[0][0] == 3 and depths[-1][0] == 0


def test_a_model_that_reads_no_trees_drafts_a_chain() -> None:
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    target = target_of("llama")
    for budget in BUDGETS.values():
        out = decode(target, checked(model), budget)
        assert out.sequences[0].tolist() == plain(target)
        assert {r.proposed for r in out.stats.log} <= {0, 1, 2, 3, 4} and out.stats.proposed > 0


def test_a_prompt_longer_than_its_positions() -> None:
    target, model = target_of("gpt2"), tiny_model("gpt2", n_positions=4)
    out = decode(target, DraftModelDrafter(model), Budget.chain(3))
    assert out.sequences[0].tolist() == plain(target) and out.stats.proposed == 0


def test_ruined_weights_draft_badly_and_harm_nothing() -> None:
    target, model = target_of("llama"), tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    for budget in BUDGETS.values():
        assert decode(target, DraftModelDrafter(model), budget).sequences[0].tolist() == plain(target)


def test_tokens_it_never_drafted_may_be_committed() -> None:
    """As when another drafter of a hybrid was right."""
    model = cousin("llama")
    drafter = checked(model)
    drafter.begin(target_of("llama"), PROMPT, None)
    for ids in ([3, 1, 4], [1], [5, 9, 2, 6, 5]):
        first = drafter.propose(Budget.chain(4), None)
        again = drafter.propose(Budget.chain(4), None)
        assert len(first) == 4 and first.tokens == again.tokens
        drafter.commit(None, ids)
    drafter.commit(None, [3, 5])  # a round without a draft
    drafter.propose(Budget(rows=8, depth=3, width=2), None)


def test_forks_decode_other_texts_in_turn() -> None:
    target, first = target_of("llama"), DraftModelDrafter(cousin("llama"))
    prompts = [PROMPT, PROMPT[:, :4]]
    alone = [target.model.generate(p, max_new_tokens=NEW, do_sample=False)[0].tolist() for p in prompts]
    texts = [
        Decoding(target, p, drafter, Budget.chain(3), Stop(p.shape[1] + NEW))
        for p, drafter in zip(prompts, (first, first.fork()), strict=True)
    ]
    together = [p[0].tolist() for p in prompts]
    runs = [text.run() for text in texts]
    for _ in range(NEW):
        for text, run in zip(together, runs, strict=True):
            text += next(run, [])
    assert together == alone


# vocabularies


def saved(folder: Path, vocab: int, *, extra: str | None = None, seed: int = 0) -> str:
    """A model folder with a byte tokenizer, ``extra`` being one more token of its own."""
    tiny_model("llama", vocab=vocab, seed=seed, dtype=torch.float32).save_pretrained(folder)
    own = tokenizer()
    if extra is not None:
        own.add_tokens([extra])
    own.save_pretrained(folder)
    return str(folder)


def test_sizes_that_differ_without_tokenizers_are_an_error() -> None:
    drafter = DraftModelDrafter(tiny_model("llama", vocab=60))
    with pytest.raises(ValueError, match=r"64 and 60 rows.*cannot be told"):
        decode(target_of("llama"), drafter, Budget.chain(2))


def test_tokenizers_that_differ_are_an_error_that_names_tokens(tmp_path: Path) -> None:
    target = Target.load(saved(tmp_path / "target", 272, extra="<ours>"), dtype=torch.float32)
    at = len(tokenizer())
    with pytest.raises(ValueError, match=rf"disagree on 1 ids \({at} is '<ours>' and '<theirs>'\)"):
        DraftModelDrafter.from_spec(saved(tmp_path / "draft", 272, extra="<theirs>"), None, target)
    with pytest.raises(ValueError, match=rf"{at} is '<ours>' and nothing"):
        DraftModelDrafter.from_spec(saved(tmp_path / "less", 272), None, target)


@pytest.mark.parametrize("ours, theirs", [(264, 280), (280, 264)])
def test_padding_is_no_difference(tmp_path: Path, ours: int, theirs: int) -> None:
    """Padded ids are never drafted beyond the target's; ids that only the target has are read as some other."""
    target = Target.load(saved(tmp_path / "target", ours), dtype=torch.float32)
    drafter = DraftModelDrafter.from_spec(saved(tmp_path / "draft", theirs, seed=1), None, target)
    text: list[int] = target.model.generate(PROMPT, max_new_tokens=12, do_sample=False)[0].tolist()
    assert decode(target, drafter, Budget.chain(3), 12).sequences[0].tolist() == text
    drafter.begin(target, torch.tensor([[1, ours - 1, 2]]), None)
    draft = drafter.propose(Budget.chain(3), Sampler(temperature=5.0))
    assert all(q is not None and q.shape == (min(ours, theirs),) for q in draft.q)


def test_a_folder_is_loaded_in_its_own_dtype(tmp_path: Path) -> None:
    target = target_of("llama")
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    drafter = DraftModelDrafter.from_spec(str(tmp_path), None, target)
    assert drafter.model.dtype == torch.bfloat16 and target.dtype == torch.float64
    assert decode(target, drafter, Budget.chain(3)).sequences[0].tolist() == plain(target)
    assert drafter.module_seconds > 0


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no model"):
        DraftModelDrafter.from_spec("", None, target_of("llama"))
    with pytest.raises(OSError):
        DraftModelDrafter.from_spec(str(tmp_path / "nowhere"), None, target_of("llama"))


def test_the_same_vocabulary_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Target] = []

    def watch(target: Target, draft: Target) -> None:
        asked.append(target)
        check_vocabularies(target, draft)

    monkeypatch.setattr("infer.drafters.draft_model.check_vocabularies", watch)
    drafter, target = DraftModelDrafter(cousin("llama")), target_of("llama")
    ids: Tensor = PROMPT
    for each in (drafter, drafter.fork(), drafter):
        each.begin(target, ids, None)
    assert len(asked) <= 2
