"""Whether two models speak of the same tokens, found out before the first draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heads import embedded
from heads.target import Target

SHOWN = 3  # differing tokens that an error names


def check_vocabularies(target: Target, draft: Target) -> None:
    """Compare the vocabularies of a target and of a model that drafts for it.

    Where both tokenizers are known they must agree token by token; output matrices may then be padded to whatever
    size. Where one is unknown the output matrices must be of one size.

    Raises:
        ValueError: the vocabularies differ; sizes are given and, where known, the first tokens that differ.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    if ours is None or theirs is None:
        if target.vocab_size != draft.vocab_size:
            unknown = " and ".join(m.name for m, known in ((target, ours), (draft, theirs)) if known is None)
            raise ValueError(
                f"{_differ(target, draft)}, and without the tokenizer of {unknown} it cannot be told whether that is "
                "padding only: load the models by names that lead to their tokenizers, or use a draft model with the "
                "target's vocabulary"
            )
        return
    wrong = [at for at in sorted(ours.keys() | theirs.keys()) if ours.get(at) != theirs.get(at)]
    if wrong:
        some = ", ".join(f"{at} is {_shown(ours, at)} and {_shown(theirs, at)}" for at in wrong[:SHOWN])
        more = "" if len(wrong) <= SHOWN else ", …"
        raise ValueError(
            f"{_differ(target, draft)}; their tokenizers disagree on {len(wrong)} ids ({some}{more}): "
            "use a draft model with the target's vocabulary"
        )


def _differ(target: Target, draft: Target) -> str:
    return (
        f"the vocabularies of the target {target.name} and of the draft model {draft.name} differ: their output "
        f"matrices have {target.vocab_size} and {draft.vocab_size} rows"
    )


def _shown(tokens: dict[int, str], at: int) -> str:
    return repr(tokens[at]) if at in tokens else "nothing"


def _tokens(model: Target) -> dict[int, str] | None:
    """Id → token, or None when the model's name does not lead to a tokenizer."""
    if not (model.name == embedded.NAME or "/" in model.name or Path(model.name).is_dir()):
        return None
    try:
        tokenizer: Any = model.tokenizer()
    except (OSError, ValueError):
        return None
    return {at: token for token, at in tokenizer.get_vocab().items()}
