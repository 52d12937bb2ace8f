"""Adapters of heads on the Hub, unmerged: the heads they belong on are named and pinned, or lie beside, and checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi

import infer
from heads.adapter import load_adapter, save_adapter
from heads.base import DraftHeads
from heads.grow import Budget
from heads.hub import HubError
from heads.push import push_folder
from heads.store import HeadsFileError
from heads.target import Target
from heads.tuned import adapt, factors, merge, without_adapter
from headstart import main
from tests.heads.small import relative
from tests.hub.server import TOKEN, Hub
from tests.hub.world import PROMPT, heads_on, plain_text, save_target, text_model
from tests.written import commands

TARGET, BASE, REPO = "org/target", "org/heads", "org/adapter"
ALONE = {"adapter.json", "adapter.safetensors", "README.md", "custom_generate/generate.py"}


@pytest.fixture
def base(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DraftHeads:
    """A target and heads, both on the Hub; whoever asks is logged in."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo(TARGET)
    api.upload_folder(repo_id=TARGET, folder_path=save_target(tmp_path / "target"))
    made = heads_on(Target(text_model(), name=TARGET))
    made.save_pretrained(tmp_path / "base")
    made.push_to_hub(BASE)
    return made


@pytest.fixture
def adapted(base: DraftHeads, tmp_path: Path) -> DraftHeads:
    """The same with factors on them that say something."""
    heads = DraftHeads.from_pretrained(tmp_path / "base", base.target)
    adapt(heads, {"rank": 2, "alpha": 4})
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in factors(heads).values():
            tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.3)
    return heads.eval()


def same(found: DraftHeads, wanted: DraftHeads) -> bool:
    ours, theirs = found.state_dict(), wanted.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def decodes_with(name: str, adapted: DraftHeads) -> None:
    """By its name alone an adapter is found, drafts as the merged heads do, and the text is the target's own."""
    found = DraftHeads.from_pretrained(name, dtype=torch.float32)
    assert same(found, merge(adapted)) and not same(found, without_adapter(adapted))
    ours, theirs = (
        infer.generate(heads.target, PROMPT, heads, max_new_tokens=16, do_sample=False, budget=Budget.chain(2))
        for heads in (found, merge(adapted))
    )
    assert ours.sequences[0].tolist() == plain_text(found.target)
    assert ours.stats.accepted_per_position == theirs.stats.accepted_per_position and ours.stats.proposed > 0


def test_the_heads_are_named_and_pinned(hub: Hub, base: DraftHeads, adapted: DraftHeads, tmp_path: Path) -> None:
    save_adapter(adapted, tmp_path / "adapter", BASE)
    pushed = push_folder(tmp_path / "adapter", REPO)
    assert set(hub.files(REPO)) == set(pushed.files) == ALONE
    record = json.loads(hub.files(REPO)["adapter.json"])
    assert (record["base"], record["base_revision"]) == (BASE, hub.commits(BASE)[-1].oid)
    heads_on(base.target, seed=3).push_to_hub(BASE)  # trained again since
    decodes_with(REPO, adapted)
    assert torch.equal(
        load_adapter(REPO).state_dict()["fc.lora_A.default.weight"],
        adapted.state_dict()["fc.lora_A.default.weight"],
    )
    assert push_folder(tmp_path / "adapter", REPO, base=BASE, base_revision=record["base_revision"]).url == pushed.url


def test_the_heads_go_along(hub: Hub, adapted: DraftHeads, tmp_path: Path) -> None:
    url = adapted.push_to_hub(REPO, with_base=True)
    assert set(hub.files(REPO)) == ALONE | {"base/config.json", "base/heads.safetensors"}
    assert json.loads(hub.files(REPO)["adapter.json"])["base"] is None
    del hub.repos[BASE]
    decodes_with(REPO, adapted)
    save_adapter(adapted, tmp_path / "adapter", str(tmp_path / "base"))
    assert push_folder(tmp_path / "adapter", REPO, with_base=True).url == url, "the same from a run's folder"
    assert str(tmp_path).encode() not in b"".join(hub.files(REPO).values())


def test_in_memory_beside_heads_on_the_hub(hub: Hub, adapted: DraftHeads) -> None:
    adapted.push_to_hub(REPO, base=BASE)
    assert set(hub.files(REPO)) == ALONE
    decodes_with(REPO, adapted)
    adapted.push_to_hub(REPO)  # heads and factors as one take its place
    assert set(hub.files(REPO)) == {"config.json", "heads.safetensors", "README.md", "custom_generate/generate.py"}


def test_the_code_of_the_repository_drafts_with_it(hub: Hub, adapted: DraftHeads) -> None:
    adapted.push_to_hub(REPO, base=BASE)
    scope: dict[str, object] = {}
    exec(compile(hub.files(REPO)["custom_generate/generate.py"], "generate.py", "exec"), scope)
    model = text_model()
    ids = torch.tensor([adapted.target.tokenizer()(PROMPT)["input_ids"]])
    out = scope["generate"](model, ids, max_new_tokens=16, do_sample=False)  # type: ignore[operator]
    assert out[0].tolist() == plain_text(adapted.target)
    assert same(vars(model)["_headstart"][1], merge(adapted))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda hub: hub.repos.pop(BASE),
            HubError,
            r"the heads org/heads \(revision \w{40}\), on which the adapter org/adapter belongs, cannot be had: there "
            r"is no repository org/heads on the Hub.* name them: base=",
        ),
        (
            lambda hub: other(hub, "base_sha256", "0" * 64),
            HeadsFileError,
            r"org/heads at \w{40} are not the heads that org/adapter was trained on \(hash 000000000000… there, "
            r"\w{12}… here\): name those with base=",
        ),
        (lambda hub: other(hub, "base", "/etc/heads"), HeadsFileError, r"names '/etc/heads' for .* which is no Hub id"),
        (lambda hub: other(hub, "base", REPO, "main"), HeadsFileError, r"org/adapter, which is an adapter too: merge"),
        (lambda hub: other(hub, "base", "org/none", None), HubError, r"the heads org/none, on .* no repository org/no"),
        (lambda hub: other(hub, "base_revision", 3), HeadsFileError, r"is not an adapter's record .base_revision is 3"),
        (lambda hub: hub.files(REPO).pop("adapter.safetensors"), HubError, r"on the Hub has no adapter\.safetensors"),
    ],
)
def test_missing_or_other_heads_are_one_error(
    change: object, error: type[Exception], message: str, hub: Hub, adapted: DraftHeads, tmp_path: Path
) -> None:
    adapted.push_to_hub(REPO, base=BASE)
    change(hub)  # type: ignore[operator]
    with pytest.raises(error, match=message):
        DraftHeads.from_pretrained(REPO, adapted.target, cache_dir=tmp_path / "empty")


def other(hub: Hub, key: str, value: object, *revision: str | None) -> None:
    """The pushed record says something else."""
    record = json.loads(hub.files(REPO)["adapter.json"]) | {key: value}
    if revision:
        record["base_revision"] = revision[0]
    hub.files(REPO)["adapter.json"] = json.dumps(record).encode()


def test_heads_are_named_where_they_moved_to(hub: Hub, base: DraftHeads, adapted: DraftHeads, tmp_path: Path) -> None:
    adapted.push_to_hub(REPO, base=BASE)
    del hub.repos[BASE]
    moved = DraftHeads.from_pretrained(REPO, base.target, base=str(tmp_path / "base"))
    assert same(moved, merge(adapted))
    with pytest.raises(ValueError, match=r"base is no adapter, so it belongs on no other heads: leave base= out"):
        DraftHeads.from_pretrained(tmp_path / "base", base.target, base=BASE)


def test_what_others_could_not_use_is_not_pushed(
    hub: Hub, base: DraftHeads, adapted: DraftHeads, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    save_adapter(adapted, folder, str(tmp_path / "base"))
    asked = len(hub.requests)
    with pytest.raises(ValueError, match=r"base', a folder that nobody else has: push those and .*--with-base"):
        push_folder(folder, REPO)
    assert len(hub.requests) == asked
    heads_on(base.target, seed=3).push_to_hub("org/others")
    with pytest.raises(HeadsFileError, match=r"org/others at \w{40} are not the heads that .*adapter was trained on"):
        push_folder(folder, REPO, base="org/others")
    with pytest.raises(
        HubError, match=r"on which the adapter .*adapter belongs, cannot be had: .* no repository org/none"
    ):
        push_folder(folder, REPO, base="org/none")
    with pytest.raises(ValueError, match="is no adapter, so it belongs on no other heads"):
        push_folder(tmp_path / "base", REPO, base=BASE)
    with pytest.raises(ValueError, match="merge the adapter, or push it without bundle"):
        adapted.push_to_hub(REPO, base=BASE, bundle=True)
    base.config = replace(base.config, target=replace(base.config.target, name=str(tmp_path), weights="0" * 64))
    base.save_pretrained(tmp_path / "base")  # the same heads, as of another target that nobody else has
    with pytest.raises(
        ValueError, match=r"name their target as .*, a folder that nobody else has: push them to a reposi"
    ):
        push_folder(folder, REPO, with_base=True)
    assert REPO not in hub.repos


def test_the_verbs(
    hub: Hub, base: DraftHeads, adapted: DraftHeads, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapter"
    save_adapter(adapted, folder, str(tmp_path / "base"))
    asked = len(hub.requests)
    for more in (["--base", BASE], ["--with-base"], ["--base", BASE, "--with-base"]):
        assert main(["push", str(folder), REPO, *more, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert "adapter.safetensors" in said and ("base/heads.safetensors" in said) == ("--with-base" in more)
    assert len(hub.requests) == asked, "the Hub is asked nothing"
    assert main(["push", str(folder), REPO]) == 2
    assert "name their repository with base= (--base)" in capsys.readouterr().err
    assert main(["push", str(folder), REPO, "--base", BASE]) == 0
    assert main(["generate", REPO, PROMPT, "--max-new-tokens", "4", "--dtype", "float32"]) == 0
    assert main(["merge", REPO, "--out", str(tmp_path / "merged")]) == 0
    merged = DraftHeads.from_pretrained(tmp_path / "merged", base.target, dtype=torch.float32)
    assert max(relative(merged.state_dict()[name], value) for name, value in merge(adapted).state_dict().items()) < 1e-6
    assert main(["merge", str(tmp_path / "base"), "--out", str(tmp_path / "again")]) == 2
    assert "ordinary heads already: there is nothing to merge" in capsys.readouterr().err


def test_the_card_says_what_it_is(hub: Hub, adapted: DraftHeads) -> None:
    adapted.push_to_hub(REPO, base=BASE)
    card = hub.files(REPO)["README.md"].decode()
    assert "An adapter of draft heads for speculative decoding of `org/target`" in card
    assert f"| belongs on | `org/heads` at revision `{hub.commits(BASE)[-1].oid}` |" in card
    assert "| adapter | LoRA of rank 2, alpha 4, on all linear layers |" in card
    assert f"| parameters | {sum(tensor.numel() for tensor in factors(adapted).values()):,} |" in card
    run = [words[1:3] for words in commands(card, "") if words[0] == "headstart"]
    assert run[0] == ["merge", REPO] and run[1:] == [["export", "./merged"]] * 2  # for each engine
    adapted.push_to_hub(REPO, with_base=True)
    assert "| belongs on | the heads in `base/` of this repository |" in hub.files(REPO)["README.md"].decode()
