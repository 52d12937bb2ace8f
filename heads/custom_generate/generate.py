"""Decode with the draft heads of this repository; the text is exactly the target's own.

Used through plain transformers (the package ``headstart`` must be installed):

    model.generate(**inputs, custom_generate="ORG/HEADS", trust_remote_code=True)

or with a folder of heads that was never pushed: ``custom_generate="ORG/HEADS", heads="runs/mine/heads"``. Where heads
and target are in one repository or folder, loading it with ``trust_remote_code=True`` is enough: ``model.generate``
then drafts by itself.
"""

import os
from typing import Any

# transformers copies this file away from its repository and does not tell it which one it came from: pushing the
# heads writes their repository and the commit of their weights here.
REPOSITORY: str | None = None
COMMIT: str | None = None


def generate(model: Any, inputs: Any = None, heads: Any = None, draft: Any = None, **kwargs: Any) -> Any:
    """As ``model.generate``; ``heads`` names other heads than this repository's (a folder or a Hub id), ``draft`` what
    else to draft with, such as ``"lookup+heads"``."""
    try:
        import infer
        from heads import DraftHeads
    except ImportError as problem:
        raise ImportError("these heads need Headstart: run `pip install .` in a clone of it") from problem
    from transformers.generation import GenerateDecoderOnlyOutput

    name, revision = (REPOSITORY, COMMIT) if heads is None else (str(heads), None)
    beside = getattr(model, "name_or_path", "")  # where the model was loaded from: perhaps with heads of its own
    if name is None and beside and os.path.isdir(os.path.join(beside, "heads")):
        name = beside
    if name is None:
        raise ValueError("these heads were not pushed to a Hub: pass heads= with their folder")
    kept = vars(model).get("_headstart")  # so that only the first call loads them
    if kept is None or kept[0] != (name, revision):
        kept = (name, revision), DraftHeads.from_pretrained(name, model, revision=revision, token=kwargs.get("token"))
        vars(model)["_headstart"] = kept

    given = {key: value for key, value in kwargs.items() if value is not None and key != "token"}
    prompt = inputs if inputs is not None else given.pop("input_ids", None)
    config = given.get("generation_config") or model.generation_config
    as_dict = given.pop("return_dict_in_generate", config.return_dict_in_generate)
    drafter = infer.drafters.make(draft, kept[1], kept[1].target)
    out = infer.generate(model, prompt, draft=drafter, **given)
    if not as_dict:
        return out.sequences
    fields: dict[str, Any] = {"sequences": out.sequences, "scores": out.scores, "logits": out.logits}
    return GenerateDecoderOnlyOutput(**fields)
