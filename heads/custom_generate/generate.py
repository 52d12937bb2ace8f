"""Decode with the draft heads of this repository; the text is exactly the target's own.

Used through plain transformers (the package ``headstart`` must be installed):

    model.generate(**inputs, custom_generate="ORG/HEADS", trust_remote_code=True)

or with a folder of heads of your own: ``custom_generate=FOLDER, heads=FOLDER``.
"""

from typing import Any
from weakref import WeakKeyDictionary

# transformers copies this file away from its repository and does not tell it which one it came from: pushing the
# heads writes their repository and the commit of their weights here.
REPOSITORY: str | None = None
COMMIT: str | None = None

_loaded: WeakKeyDictionary[Any, Any] = (
    WeakKeyDictionary()
)  # model -> (which heads, the heads), so that only the first call loads them


def generate(model: Any, inputs: Any = None, heads: Any = None, **kwargs: Any) -> Any:
    """As ``model.generate``; ``heads`` names other heads than this repository's (folder, id, or loaded)."""
    try:
        import infer
        from heads import DraftHeads
    except ImportError as problem:
        raise ImportError("these heads need the package headstart: run `pip install headstart`") from problem

    wanted = (heads, None) if heads is not None else (REPOSITORY, COMMIT)
    if wanted[0] is None:
        raise ValueError("these heads were not pushed to a Hub: pass heads= with their folder")
    if not isinstance(wanted[0], DraftHeads):
        name, revision = str(wanted[0]), wanted[1]
        if _loaded.get(model, (None,))[0] != (name, revision):
            _loaded[model] = (name, revision), DraftHeads.from_pretrained(name, model, revision=revision)
        wanted = (_loaded[model][1], revision)
    return infer.run_custom_generate(model, inputs, draft=wanted[0], **kwargs)
