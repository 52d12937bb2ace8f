"""The certificate: on this machine, with these weights, what is decoded with a draft is what the target says.

Three questions, each asked of the real loop:

- greedy, float32: is every token that of ``model.generate``? A flip counts only between tokens 1e-4 apart.
- greedy, bfloat16: is every first difference a near-tie, closer than the target's own rounding noise?
- sampled: do first rounds follow the target's law, by chi-square, while a decoder with a known wrong rule does not?
"""

from __future__ import annotations

import hashlib
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers
from torch import Tensor

from heads.grow import Budget
from heads.target import Target
from infer.drafters import Drafter
from infer.evaluate import Question, Settings
from infer.law import (
    POSITIONS,
    Sampling,
    compare,
    expected_law,
    most_telling,
    residual_from_target,
    sample_rounds,
)
from infer.machine import machine
from infer.progress import progress
from infer.rounding import FLOAT32_GAP, first_difference, logit_noise
from infer.verify import Rule

Load = Callable[[torch.dtype], tuple[Target, Drafter]]
FLIPS_ALLOWED = 100_000  # positions for each near-tie flip that float32 is allowed, one at least
LEAST_REJECTED = 0.3


@dataclass(frozen=True)
class Plan:
    """What a certificate looks at.

    Attributes:
        dtypes: greedy identity is checked in each.
        budgets: drafts by name, for greedy identity.
        max_new_tokens: length of the greedy answers.
        noise_texts: answers read to measure rounding noise.
        law_budgets: drafts by name, for the sampled law; the first, a chain, is also decoded with the wrong rule.
            Tokens are drawn; trees are looked at a second time with chosen tokens.
        law_prompts: how many of the prompts given for the sampled law are used, the most telling ones.
        sampling: draws and filters of the sampled law.
    """

    budgets: Mapping[str, Budget]
    law_budgets: Mapping[str, Budget]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    max_new_tokens: int = 64
    noise_texts: int = 2
    law_prompts: int = 2
    sampling: Sampling = field(default_factory=Sampling)

    @classmethod
    def usual(cls, lookahead: int, *, max_new_tokens: int = 64, sampling: Sampling | None = None) -> Plan:
        """A chain and a tree by confidence, the trees of the sampled law kept small."""
        return cls(
            budgets={
                f"chain {lookahead}": Budget.chain(lookahead),
                "tree 16": Budget(rows=16, depth=lookahead, width=8),
            },
            law_budgets={
                "chain 2": Budget.chain(min(2, lookahead)),
                "tree 8": Budget(rows=8, depth=min(2, lookahead), width=4),
            },
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
        )


@torch.inference_mode()
def certify(load: Load, questions: Sequence[Question], law_prompts: Sequence[Tensor], plan: Plan) -> dict[str, Any]:
    """Certify a drafter on a target.

    Args:
        load: gives target and drafter in a dtype; one pair is held at a time.
        questions: prompts for greedy identity.
        law_prompts: (1, n) short prompts for the sampled law, more than are used.
        plan: what to look at.

    Returns:
        The certificate, plain values: ``passed``; ``greedy`` by dtype; ``sampled``; ``versions`` and ``settings``.

    Raises:
        ValueError: there is no prompt.
    """
    if not questions or not law_prompts:
        raise ValueError("a certificate needs at least one prompt for greedy and one for sampled text")
    started = time.perf_counter()
    greedy: dict[str, Any] = {}
    sampled: dict[str, Any] = {}
    for dtype in plan.dtypes:
        target, drafter = load(dtype)
        greedy[str(dtype).removeprefix("torch.")] = greedy_identity(target, drafter, questions, plan)
        if not sampled:  # the first dtype, the most exact: in half precision p itself would depend on the pass
            sampled = sampled_law(target, drafter, law_prompts, plan)
            name, weights, device = target.name, target.weights_hash(), target.device
        del target, drafter
    return {
        "passed": all(block["passed"] for block in greedy.values()) and sampled["passed"],
        "target": {"name": name, "sha256": weights},
        "greedy": greedy,
        "sampled": sampled,
        "settings": {
            "prompts": [question.id for question in questions],
            "prompts_sha256": _hash([question.ids for question in questions]),
            "law_prompts_sha256": _hash(law_prompts),
            "drafts": {name: _named(budget) for name, budget in plan.budgets.items()},
            "max_new_tokens": plan.max_new_tokens,
            "sampling": asdict(plan.sampling),
        },
        "versions": versions(device),
        "seconds": time.perf_counter() - started,
    }


def versions(device: torch.device | str = "cpu") -> dict[str, str]:
    """What the certificate holds for."""
    try:
        own = {"headstart": version("headstart")}
    except PackageNotFoundError:  # run from a checkout
        own = {}
    return own | {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.machine()} {platform.system()}",
        "machine": machine(device),
    }


def _hash(prompts: Sequence[Tensor]) -> str:
    """SHA-256 of token ids, a prompt a line."""
    lines = "\n".join(" ".join(map(str, ids.flatten().tolist())) for ids in prompts)
    return hashlib.sha256(lines.encode()).hexdigest()


def reference(target: Target, question: Question, max_new_tokens: int) -> list[int]:
    """New tokens of bare ``model.generate``, greedy."""
    ids = question.ids.to(target.device)
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, num_beams=1
    )
    return out[0, ids.shape[1] :].tolist()


def greedy_identity(target: Target, drafter: Drafter, questions: Sequence[Question], plan: Plan) -> dict[str, Any]:
    """Every budget's text beside ``model.generate``'s; differences are re-scored and held against rounding."""
    half = target.dtype in (torch.bfloat16, torch.float16)
    settings = Settings(plan.max_new_tokens)
    found: list[dict[str, Any]] = []
    gaps: list[float] = []
    texts: list[tuple[Tensor, list[int]]] = []
    positions = 0
    for place, question in enumerate(progress(questions, len(questions), f"greedy, {target.dtype}")):
        theirs = reference(target, question, plan.max_new_tokens)
        texts.append((question.ids, theirs))
        for name, budget in plan.budgets.items():
            out = settings.decode(target, drafter, question, budget, place)
            ours = out.sequences[0, question.ids.shape[1] :].tolist()
            positions += len(theirs)
            difference = first_difference(target, question.ids, ours, theirs)
            if difference is not None:
                gaps.append(difference.gap)
                found.append({"prompt": question.id, "draft": name} | difference.to_dict())
    widest = max(budget.rows for budget in plan.budgets.values())
    bound = logit_noise(target, texts[: plan.noise_texts], widest) if half else FLOAT32_GAP
    rare = half or len(found) <= 1 + positions // FLIPS_ALLOWED
    for row, gap in zip(found, gaps, strict=True):
        row["near_tie"] = gap < bound or gap == 0
    return {
        "passed": rare and all(row["near_tie"] for row in found),
        "identical": not found,
        "texts": len(questions) * len(plan.budgets),
        "positions": positions,
        "bound": bound,
        "bound_is": f"99.9th percentile of logit noise between one-row and {widest}-row passes" if half else "fixed",
        "differences": found,
    }


def sampled_law(target: Target, drafter: Drafter, prompts: Sequence[Tensor], plan: Plan) -> dict[str, Any]:
    """First rounds of each law budget, and of the first one under a wrong rule, against the target's own law."""
    runs: dict[str, tuple[Budget, Rule | None, bool]] = {}
    for name, budget in plan.law_budgets.items():
        runs[name] = budget, None, True
        if budget.width > 1:
            runs[f"{name}, chosen"] = budget, None, False
    first = next(iter(plan.law_budgets))
    control = f"{first}, wrong residual"
    prompts = most_telling(target, drafter, prompts, plan.law_prompts, plan.sampling)
    runs[control] = plan.law_budgets[first], residual_from_target, True
    blocks = {name: _law_block(target, drafter, prompts, run, plan.sampling) for name, run in runs.items()}
    negative = blocks.pop(control)
    return {
        "passed": all(block["passed"] for block in blocks.values()) and not negative["passed"],
        "enough_rejections": blocks[first]["rejected"] >= LEAST_REJECTED,
        "drafts": blocks,
        "control": {"name": control, "failed_as_it_must": not negative["passed"]} | negative,
    }


def _named(budget: Budget) -> dict[str, Any]:
    """A budget as a certificate has it: its size and shape; the rest is a control's, and there is none here."""
    return {name: getattr(budget, name) for name in ("rows", "depth", "width", "shape")}


def _law_block(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    run: tuple[Budget, Rule | None, bool],
    sampling: Sampling,
) -> dict[str, Any]:
    budget, rule, draw = run
    each = [sample_rounds(target, drafter, prompt, budget, sampling, rule, draw=draw) for prompt in prompts]
    tests = []
    for observed in each:
        law = expected_law(target, observed.prompt, list(observed.counts), sampling)
        tests += [compare(observed, law, position).to_dict() | {"position": position} for position in POSITIONS]
    accepted, rejected = sum(seen.accepted for seen in each), sum(seen.rejected for seen in each)
    return {
        "passed": all(test["passed"] for test in tests),
        "rejected": rejected / (accepted + rejected) if accepted + rejected else 0.0,
        "tests": tests,
    }


def table(certificate: Mapping[str, Any]) -> str:
    """The certificate for people."""
    lines = [f"{certificate['target']['name']}, weights sha256 {certificate['target']['sha256'][:16]}…"]
    for dtype, block in certificate["greedy"].items():
        lines.append(
            f"greedy {dtype:<9} {_verdict(block['passed'])}  {block['texts']} texts, {block['positions']} tokens "
            f"beside model.generate, {len(block['differences'])} differ "
            f"(near-tie bound {block['bound']:.2g}, {block['bound_is']})"
        )
        for row in block["differences"]:
            gap = "the text ends" if row["gap"] is None else f"gap {row['gap']:.2g}"
            gap += ", a near-tie" if row["near_tie"] else ", NOT A NEAR-TIE"
            lines.append(
                f"    prompt {row['prompt']}, {row['draft']}: token {row['position']} is {row['ours']}, "
                f"model.generate has {row['theirs']}; {gap}"
            )
    sampled = certificate["sampled"]
    for name, block in sampled["drafts"].items():
        lines.append(f"sampled {name:<8} {_verdict(block['passed'])}  {_tests(block)}")
    lines.append(
        f"wrong rule       {'refused, as it must be' if sampled['control']['failed_as_it_must'] else 'NOT NOTICED'}  "
        f"{_tests(sampled['control'])}"
    )
    if not sampled["enough_rejections"]:
        lines.append(
            f"note: under {LEAST_REJECTED:.0%} of drafts were rejected: the sampled test says little about rejections"
        )
    lines.append(f"{'CERTIFIED' if certificate['passed'] else 'NOT LOSSLESS'} in {certificate['seconds']:.0f} s")
    return "\n".join(lines)


def _verdict(passed: bool) -> str:
    return "ok    " if passed else "FAILED"


def _tests(block: Mapping[str, Any]) -> str:
    worst = max(block["tests"], key=lambda test: test["statistic"] / test["limit"] if test["limit"] else 0.0)
    impossible = sum(test["impossible"] for test in block["tests"])
    text = (
        f"χ² {worst['statistic']:.0f} of at most {worst['limit']:.0f} "
        f"(df {worst['df']}, token {worst['position'] + 1}), {block['rejected']:.0%} of drafts rejected"
    )
    return text + (f", {impossible} impossible tokens" if impossible else "")
