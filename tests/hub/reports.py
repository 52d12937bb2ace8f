"""Reports as the verbs write them, small: what a card is made of."""

from __future__ import annotations

from typing import Any

SHA = "a" * 64


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def block(value: float, joint: list[float], prompts: int = 4) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "rows": 6,
        "rounds": 210,
        "tokens_per_round": interval(value - 0.04),
        "loop_free_tokens_per_round": interval(value),
        "accepted_per_position": joint,
    }


def evaluation() -> dict[str, Any]:
    """Two budgets over two tasks."""
    budgets = {}
    for name, value, joint in (("chain 5", 1.74, [0.42, 0.19]), ("tree 16", 2.31, [0.6, 0.3, 0.12])):
        tasks = {"writing": block(value + 0.2, joint, 3), "coding": block(value - 0.2, joint, 1)}
        budgets[name] = block(value, joint) | {"by_category": tasks}
    settings = {"prompts": 4, "max_new_tokens": 96, "temperature": 0.0, "seed": 0}
    return {
        "heads": "/home/somebody/runs/mine/heads",
        "heads_sha256": SHA,
        "prompts": "/home/somebody/data/heldout.jsonl.gz",
        "target": "org/target",
        "dtype": "bfloat16",
        "settings": settings,
        "budgets": budgets,
    }


def bench() -> dict[str, Any]:
    """Three arms on one machine."""
    arms = {
        name: {
            "tokens_per_second": speed,
            "tokens_per_second_loop_free": speed + 0.5,
            "ttft_seconds": {"p50": 0.0812},
        }
        for name, speed in (("model.generate", 20.0), ("loop without draft", 19.0), ("heads", 31.0))
    }
    settings = {"prompts": 12, "max_new_tokens": 96, "decoding": "greedy", "dtype": "bfloat16", "device": "cpu"}
    return {
        "heads_sha256": SHA,
        "settings": settings | {"machine": "Xeon, 2 cores", "threads": 2, "order": "interleaved by prompt, rotating"},
        "budget": {"rows": 16, "depth": 3, "width": 8, "shape": None},
        "baseline": "model.generate",
        "speedup": 1.534,
        "speedups": {"median": 1.49, "pooled": 1.5, "median_loop_free": 1.534, "pooled_loop_free": 1.55},
        "arms": arms,
    }


def chi_square(statistic: float, limit: float) -> list[dict[str, Any]]:
    test = {"df": 40, "limit": limit, "draws": 900, "impossible": 0}
    return [test | {"statistic": statistic, "position": 1}, test | {"statistic": 1.0, "position": 2}]


def certificate(passed: bool = True) -> dict[str, Any]:
    """Greedy in two dtypes, one draft's law and its control."""
    difference = {"prompt": "3", "draft": "tree 16", "position": 7, "gap": 0.12, "near_tie": True}
    greedy = {
        "float32": {"passed": True, "texts": 12, "positions": 576, "bound": 1e-4, "differences": []},
        "bfloat16": {"passed": passed, "texts": 12, "positions": 576, "bound": 0.69, "differences": [difference]},
    }
    control = {"name": "chain 2, wrong residual", "failed_as_it_must": True, "tests": chi_square(910.25, 129.4)}
    return {
        "ok": passed,
        "passed": passed,
        "heads": {"name": "/home/somebody/runs/mine/heads", "sha256": SHA, "form": "headstart"},
        "target": {"name": "/home/somebody/target", "sha256": "b" * 64},
        "greedy": greedy,
        "sampled": {"drafts": {"chain 2": {"passed": True, "tests": chi_square(38.5, 129.4)}}, "control": control},
        "versions": {"torch": "2.13.0", "machine": "Xeon, 2 cores"},
    }


def training() -> dict[str, Any]:
    """A run's report.json."""
    return {
        "steps": 400,
        "seconds": 900.5,
        "processes": 1,
        "data": {"conversations": 1599, "tokens": 309066, "answer_tokens": 245937, "digest": "c" * 16},
        "settings": {
            "data.train": "builtin:train",
            "data.cache_folder": None,
            "target.name": "/home/somebody/target",
            "heads.kind": "eagle",
            "heads.lookahead": 3,
            "train.lr": 2e-3,
            "train.loss": {"soft_ce": 1.0},
            "max_steps": 400,
        },
        "versions": {"torch": "2.13.0"},
    }
