"""How a call's passes are run: as they come, of a fixed number of rows, in a static cache, compiled.

``stable=`` fixes the rows and exchanges the attention (:mod:`infer.stable`), ``cache_implementation="static"`` fixes
the cache (:mod:`infer.static`), ``compile=True`` fixes both and compiles (:mod:`infer.compiled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from transformers import GenerationConfig

from heads.grow import Budget
from heads.target import Target
from infer.compiled import Compiled
from infer.decode import Decoding
from infer.drafters import refuse_inside
from infer.in_turn import InTurn
from infer.prefix import PrefixCache
from infer.rounds import Rounds
from infer.stable import fixed_rows, stable_passes
from infer.static import StaticCache

ROOM = 64  # rows a static cache has beyond the longest text, where the rows of a pass are not fixed

_COMPILE = ("backend", "mode", "fullgraph", "options")  # of a CompileConfig; shapes are never dynamic here


@dataclass(frozen=True)
class Passes:
    """What of ``generate``'s arguments says how passes are run.

    Attributes:
        stable: True or a number of rows (``infer.stable``).
        compiled: through ``torch.compile``.

    Raises:
        ValueError: ``stable`` is something else.
    """

    stable: bool | int = False
    compiled: bool = False

    def __post_init__(self) -> None:
        fixed_rows(self.stable)

    def rows(self, budget: Budget) -> int | None:
        """Rows of every pass after the prefill, for drafts of this budget; None when they come as they are."""
        return fixed_rows(self.stable) or (budget.rows if self.compiled else None)

    @contextmanager
    def rounds(
        self, texts: Sequence[Decoding], config: GenerationConfig, prefix: PrefixCache | None = None
    ) -> Iterator[Rounds | InTurn]:
        """The loop over texts that were set up with :meth:`rows`; it may run inside only.

        Texts of a target that reads one text a pass are decoded one after another.

        Raises:
            ValueError: a setting of the cache or of the compiler that cannot be honoured.
        """
        target, rows = texts[0].target, texts[0].fixed_rows
        static = config.cache_implementation == "static"
        _check(target, config, static, self.compiled, len(texts))
        if self.compiled:
            refuse_inside(texts[0].drafter, "compile=True")
        if self.stable and target.by_place:
            raise ValueError(
                f"stable is not supported for {target.name}: its {target.by_place} go by places in the cache, where "
                "filler rows would stand"
            )
        if (target.by_place or target.rotary_border is not None) and len(texts) > 1:
            yield InTurn(texts, partial(Rounds, prefix=prefix))
            return
        capacity = config.max_cache_len or _capacity(texts)
        around = [partial(stable_passes, target)] if self.stable else []
        with ExitStack() as kept:
            cache = StaticCache(target, len(texts), capacity=capacity) if static and not self.compiled else None
            if self.compiled:
                compiled = Compiled.of(target, (rows, self.stable), _options(config))
                cache = kept.enter_context(compiled.cache(target, capacity))
                around.append(partial(compiled.passes, target))
            yield Rounds(texts, cache=cache, fixed_rows=rows, prefix=prefix, within=partial(_all, around))


@contextmanager
def _all(around: Sequence[Callable[[], AbstractContextManager[None]]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in around:
            stack.enter_context(each())
        yield


def _capacity(texts: Sequence[Decoding]) -> int:
    """Positions for the longest of the texts, and for the drafts behind it."""
    longest = max(text.stop.max_length for text in texts)
    most = texts[0].target.max_positions
    longest = longest if most is None else min(longest, most)
    return longest + max(text.fixed_rows or max(ROOM, text.budget.rows) for text in texts)


def _check(target: Target, config: GenerationConfig, static: bool, compiled: bool, texts: int) -> None:
    if compiled and texts > 1:
        raise ValueError(f"compile=True decodes one text a call, and there are {texts}")
    if config.max_cache_len is not None and not (static or compiled):
        raise ValueError('max_cache_len belongs to cache_implementation="static"')
    if config.compile_config is not None and not compiled:
        raise ValueError("compile_config belongs to compile=True")
    if (static or compiled) and target.by_place:
        raise ValueError(
            f"a static cache is not supported for {type(target.model).__name__}: its {target.by_place} go by places in "
            "the cache"
        )


def _options(config: GenerationConfig) -> dict[str, object]:
    """What the call's ``compile_config`` says, in ``torch.compile``'s words."""
    chosen = {name: getattr(config.compile_config, name, None) for name in _COMPILE}
    if chosen["backend"] != "inductor":
        del chosen["mode"]  # CompileConfig always names one, and other compilers know none
    return {name: value for name, value in chosen.items() if value is not None}
