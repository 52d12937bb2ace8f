"""What the heads are worth when they really decode, beside what training says of them.

Training judges every position of known text; decoding starts a round where the last one ended. The two should
agree; where they do not, something differs between the training unroll and drafting, or the held-out answers are
not the target's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any

from torch import Tensor

from heads.base import DraftHeads
from heads.kinds import build
from heads.target import Target
from infer.drafters.heads import HeadsDrafter
from infer.drafters.inside import usual_budget
from infer.generate import generate
from infer.metrics import Round, loop_free
from train.figures import Figures
from train.in_step import InStep
from train.ranks import Ranks

TOLERANCE, SHARE = 0.25, 0.35  # tokens per round, and share of the tokens drafted, by which the two may differ


@dataclass(frozen=True)
class Decoded:
    """Greedy chain decoding of held-out prompts, over all processes.

    Attributes:
        prompts, rounds: how many.
        tokens_per_round: bonus included.
        loop_free: the same over rounds outside repetitions of the output's own text.
        acceptance: by draft position, share of rounds that accepted it and all before it.
        deviation: standard deviation of the tokens of one round.
    """

    prompts: int
    rounds: int
    tokens_per_round: float
    loop_free: float
    acceptance: list[float]
    deviation: float

    def flat(self) -> dict[str, float]:
        """For trackers."""
        by_position = {f"decoded/acceptance/{k}": value for k, value in enumerate(self.acceptance, 1)}
        return {"decoded/tokens_per_round": self.tokens_per_round, "decoded/loop_free": self.loop_free} | by_position

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def decoding_copy(heads: DraftHeads) -> DraftHeads:
    """The heads as a user will load them: in the target's dtype, in eval mode; training's weights stay untouched."""
    copy = build(heads.config, heads.target, check=False)
    copy.load_state_dict({name: value.detach() for name, value in heads.state_dict().items()})
    return copy.to(device=heads.target.device, dtype=heads.target.dtype).eval()


def decode_prompts(
    heads: DraftHeads,
    prompts: Sequence[Tensor],
    ranks: Ranks,
    *,
    tokens: int,
    lookahead: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Decoded:
    """Decode prompts greedily with chains; all processes call this and share the prompts.

    Args:
        prompts: (n,) ids each, the same list on every process.
        tokens: new tokens a prompt, fewer where the target has no more positions.
        lookahead: depth of the chains; the heads' own for None.
        stop: asked between prompts; when it is true on any process all return what they have.
    """
    copy = decoding_copy(heads)
    depth = lookahead or copy.config.lookahead
    target = copy.target
    log: list[Round] = []
    free: list[Round] = []
    done = 0
    for turn in range(-(-len(prompts) // ranks.count)):
        if ranks.add([float(stop())])[0]:
            break
        at = turn * ranks.count + ranks.index
        with InStep(target, ranks) as steps:
            if at < len(prompts):
                ids = prompts[at][None].to(target.device)
                drafter = HeadsDrafter(copy)
                out = generate(
                    target.model,
                    ids,
                    drafter,
                    budget=usual_budget(drafter, depth),
                    max_new_tokens=min(tokens, _room(target, ids.shape[1])),
                    do_sample=False,
                )
                log += out.stats.log
                free += loop_free(out.stats)
                done += 1
            steps.along()
    return _summed(log, free, done, depth, ranks)


def _room(target: Target, prompt: int) -> int:
    """New tokens for which the target has positions behind a prompt; the last of a text needs none."""
    border = target.rotary_border
    most = border if border is not None and prompt <= border else target.max_positions
    return sys.maxsize if most is None else max(1, most - prompt + 1)


def _summed(log: list[Round], free: list[Round], prompts: int, depth: int, ranks: Ranks) -> Decoded:
    emitted, squares = sum(r.emitted for r in log), sum(r.emitted**2 for r in log)
    own = [prompts, len(log), emitted, squares, len(free), sum(r.emitted for r in free)]
    hits = [sum(r.accepted >= k for r in log) for k in range(1, depth + 1)]
    count, rounds, emitted_, squares_, free_rounds, free_emitted, *accepted = ranks.add([*own, *hits])
    mean = emitted_ / rounds if rounds else 0.0
    return Decoded(
        prompts=int(count),
        rounds=int(rounds),
        tokens_per_round=mean,
        loop_free=free_emitted / free_rounds if free_rounds else 0.0,
        acceptance=[value / rounds if rounds else 0.0 for value in accepted],
        deviation=sqrt(max(0.0, squares_ / rounds - mean**2)) if rounds else 0.0,
    )


def disagreement(taught: Figures, decoded: Decoded) -> str | None:
    """What to warn of when training-side acceptance and real decoding do not fit together, else None.

    They are compared as tokens per round over the same draft depth. Some difference is expected (rounds do not
    start at every position alike, and few rounds scatter): three standard errors and ``TOLERANCE`` are allowed, or
    ``SHARE`` of the drafted tokens where that is more.
    """
    if not decoded.rounds:
        return None
    expected = 1.0 + sum(taught.acceptance[: len(decoded.acceptance)])
    allowed = max(TOLERANCE, SHARE * (expected - 1.0)) + 3 * decoded.deviation / sqrt(decoded.rounds)
    if abs(expected - decoded.tokens_per_round) <= allowed:
        return None
    return (
        f"held-out acceptance promises {expected:.2f} tokens per round, but decoding gives "
        f"{decoded.tokens_per_round:.2f} over {decoded.rounds} rounds (more than {allowed:.2f} apart): the held-out "
        "answers may not be the target's own, or drafting differs from the training unroll"
    )
