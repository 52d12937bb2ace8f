"""Which token stands for a place whose token is still to be drafted."""

from __future__ import annotations

from heads.target import Target


def unused_token(target: Target) -> int:
    """The highest id that is not special to a target: padding that no text contains where a vocabulary has been
    padded, its rarest token elsewhere. Never what ends or fills a text, which a mask must not be mistaken for."""
    special = special_tokens(target)
    rows = min(target.vocab_size, target.embedding.weight.shape[0])
    return next(token for token in reversed(range(rows)) if token not in special)


def special_tokens(target: Target) -> set[int]:
    """Ids that begin, end or fill texts, by the target's configurations."""
    found: set[int] = set()
    for config in (target.config, target.model.config, getattr(target.model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(config, name, None)
            found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return found
