"""What users write for a drafter: ``"heads"``, ``"lookup"``, ``"lookup+heads"``, ``"lookup:3 | heads"`` …

==================  ================================================================================================
``heads``           the heads that came with the model
``lookup``          prompt lookup from matches of 2 tokens or more; ``lookup:N`` of N or more
``model:NAME``      another model, by folder or Hub id
``layers:0-8,20``   the target's own layers (ranges include both ends)
``none``            nothing: plain decoding
``a+b``             the first of them that has something to say; a bare ``lookup`` with others behind it waits for long
                    matches (``LONG``)
``a|b``             both in one tree under one budget; binds stronger than ``+``: ``a+b|c`` is a, or else b with c
==================  ================================================================================================

White space around names, ``+`` and ``|`` does not count. A folder whose name holds ``+`` or ``|`` cannot be written
here: make the drafter and pass it.
"""

from __future__ import annotations

from collections.abc import Callable

from heads.base import DraftHeads
from heads.config import nearest
from heads.target import Target
from infer.drafters.heads import HeadsDrafter
from infer.drafters.hybrid import FirstToSpeak
from infer.drafters.lookup import SHORTEST, LookupDrafter
from infer.drafters.merge import Merged
from infer.drafters.none import NoDrafter
from infer.drafters.protocol import Drafter

# Tokens of a match that lookup drafts from when another drafter stands behind it. In answers of the embedded target to
# Spec-Bench prompts, loops left out, 2.2 tokens went on as after the last match of 3, and 1.5 after one of 2, which is
# what good heads get.
LONG = 3

# what stands behind the name's colon ("" for nothing), the heads that came with the model, the target
Maker = Callable[[str, DraftHeads | None, Target], Drafter]


def _none(argument: str, heads: DraftHeads | None, target: Target) -> Drafter:
    _no_argument("none", argument)
    return NoDrafter()


def _heads(argument: str, heads: DraftHeads | None, target: Target) -> Drafter:
    _no_argument("heads", argument)
    if heads is None:
        raise ValueError(
            'draft="heads" needs heads: name a heads repository as the model, or pass DraftHeads as the draft'
        )
    return HeadsDrafter(heads)


def _lookup(argument: str, heads: DraftHeads | None, target: Target) -> Drafter:
    if argument and not argument.isdecimal():
        raise ValueError(
            f'draft="lookup:{argument}" names no shortest match: write "lookup", or "lookup:3" to draft from matches '
            "of 3 tokens or more"
        )
    return LookupDrafter(int(argument or SHORTEST))


def _model(argument: str, heads: DraftHeads | None, target: Target) -> Drafter:
    from infer.drafters.draft_model import DraftModelDrafter
    from infer.drafters.seq2seq_model import Seq2SeqDrafter
    from infer.seq2seq import Seq2SeqTarget

    kind = Seq2SeqDrafter if isinstance(target, Seq2SeqTarget) else DraftModelDrafter
    return kind.from_spec(argument, heads, target)


def _layers(argument: str, heads: DraftHeads | None, target: Target) -> Drafter:
    from infer.drafters.early_layers import EarlyLayersDrafter

    return EarlyLayersDrafter.from_spec(argument, heads, target)


SPECS: dict[str, Maker] = {
    "heads": _heads,
    "lookup": _lookup,
    "model": _model,
    "layers": _layers,
    "none": _none,
}
PATIENT = {"lookup": str(LONG)}  # argument of a bare name when another drafter stands behind it


def read(spec: str, heads: DraftHeads | None, target: Target) -> Drafter:
    """The drafter that a spec string names.

    Args:
        spec: see the module's table.
        heads: what came with the model.
        target: what decodes.

    Raises:
        ValueError: a name that is not known, a place left empty, or an argument that does not fit.
        OSError: a model that does not exist.
    """
    choices = [[_split(piece, spec) for piece in choice.split("|")] for choice in spec.split("+")]
    parts: list[Drafter] = []
    for choice in choices:
        waits = len(choice) == 1 and choice is not choices[-1]
        parts.append(_together(choice, heads, target, PATIENT if waits else {}))
    if len(parts) == 1:
        return parts[0]
    return FirstToSpeak(parts, ["|".join(name for name, _ in choice) for choice in choices])


def _together(
    pieces: list[tuple[str, str]], heads: DraftHeads | None, target: Target, defaults: dict[str, str]
) -> Drafter:
    """One drafter, or several merged."""
    made = [SPECS[name](argument or defaults.get(name, ""), heads, target) for name, argument in pieces]
    return made[0] if len(made) == 1 else Merged(made, [name for name, _ in pieces])


def _split(piece: str, spec: str) -> tuple[str, str]:
    """Name and argument."""
    name, colon, argument = (part.strip() for part in piece.strip().partition(":"))
    if name not in SPECS:
        what = f"the drafter {name!r}, which is not known{nearest(name, SPECS)}" if name else "an empty place"
        raise ValueError(f"draft {spec!r} has {what}: use {', '.join(SPECS)}, alone or joined by + or |")
    if colon and not argument:
        raise ValueError(f"draft {spec!r} has nothing behind {name!r} and its colon")
    return name, argument


def _no_argument(name: str, argument: str) -> None:
    if argument:
        raise ValueError(f'draft="{name}:{argument}": {name!r} takes nothing behind a colon')
