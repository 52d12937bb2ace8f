"""Make a draft model of a target's first layers, taught by the target itself. This is a script to launch.

python train/distill.py --layers 6 --minutes 15 --out runs/draft6          for the embedded target, on its own text
python train/distill.py --layers 4 --steps 50 --out runs/draft4 --data my.jsonl --target ORG/NAME

infer.generate(model, prompt, draft="model:runs/draft6") then drafts with it.

The draft model has the target's vocabulary, embedding and output matrix, which stay as they are, and copies of its
first layers and final norm, which learn to say what all layers together would have said (soft targets at every token
of the answers, computed on the way). The folder is an ordinary transformers model with the target's tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Launched as a script, Python puts train/ first on the path (see train_heads.py).
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _HERE)]

import argparse  # noqa: E402
import json  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from data.prepare import prepare  # noqa: E402
from heads.embedded import NAME  # noqa: E402
from heads.target import Target  # noqa: E402
from infer.costs import measure_costs  # noqa: E402
from infer.drafters.draft_model import DraftModelDrafter  # noqa: E402
from train.assemble import BUILTIN  # noqa: E402
from train.batches import plan_epoch  # noqa: E402
from train.conversations import Conversations  # noqa: E402
from train.features import pad_ids  # noqa: E402
from train.progress import Reporter, duration  # noqa: E402
from train.schedule import SHAPES  # noqa: E402
from train.student import Judged, first_layers, judge  # noqa: E402

WARMUP = 0.04  # share of the run in which the learning rate rises
BUCKET = 16  # steps whose conversations are sorted by length together
JUDGED_BATCHES = 3  # of held-out text, before and after
REPORT = "distill.json"


@dataclass
class Settings:
    """One run; see the command line's help."""

    out: str
    layers: int
    target: str = NAME
    data: str = "builtin:train"
    heldout: str = "builtin:heldout"
    minutes: float = 15.0
    steps: int | None = None
    lr: float = 1e-3
    batch_tokens: int = 512  # steps count more than tokens in a quarter of an hour
    max_length: int = 1024
    dtype: str = "bfloat16"
    seed: int = 0


def _batches(conversations: Conversations, settings: Settings, target: Target) -> Iterator[tuple[Tensor, Tensor]]:
    """ids and loss mask of one step after another, without end; steps without an answer token are left out."""
    epoch = 0
    while True:
        for step in plan_epoch(conversations.lengths, settings.batch_tokens, BUCKET, settings.seed, epoch):
            ids, loss_mask, _ = (part.to(target.device) for part in pad_ids(conversations, step))
            if bool(loss_mask[:, 1:].any()):
                yield ids, loss_mask
        epoch += 1


def _evaluate(draft: Any, target: Target, conversations: Conversations, settings: Settings) -> dict[str, float]:
    total = Judged()
    for step in plan_epoch(conversations.lengths, settings.batch_tokens, 1, 0, 0)[:JUDGED_BATCHES]:
        ids, loss_mask, _ = (part.to(target.device) for part in pad_ids(conversations, step))
        total.add(judge(draft, target, ids, loss_mask, learn=False))
    return total.to_dict()


def train(draft: Any, target: Target, conversations: Conversations, settings: Settings, reporter: Reporter) -> int:
    """Teach the draft model until the minutes or steps are over; returns the steps made."""
    learning = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    started, seconds, steps = time.monotonic(), 60 * settings.minutes, 0
    for ids, loss_mask in _batches(conversations, settings, target):
        done = steps / settings.steps if settings.steps else (time.monotonic() - started) / seconds
        if done >= 1:
            break
        rate = settings.lr * min(1.0, max(done, 1e-3) / WARMUP) * SHAPES["cosine"](done)
        for group in optimizer.param_groups:
            group["lr"] = rate
        judged = judge(draft, target, ids, loss_mask, learn=True).to_dict()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps == 1 or steps % 10 == 0:
            reporter.say(
                f"step {steps}, {duration(time.monotonic() - started)}: loss {judged['loss']:.3f}, "
                f"agreement {judged['agreement']:.3f}, lr {rate:.1e}"
            )
    return steps


def distill(settings: Settings, reporter: Reporter | None = None) -> dict[str, Any]:
    """Run, save and report.

    Returns:
        What stands in distill.json: settings, steps, held-out loss and agreement before and after, seconds of a token.

    Raises:
        ValueError: settings that do not fit, or a folder that holds something already.
        OSError: data or a target that is not there.
    """
    reporter = reporter or Reporter(True)
    out = Path(settings.out)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} holds something already: name another folder, or remove it")
    torch.manual_seed(settings.seed)
    target = Target.load(settings.target, dtype=getattr(torch, settings.dtype))
    target.model.requires_grad_(False)
    draft = first_layers(target, settings.layers).to(target.device)
    tokenizer = target.tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        texts = {}
        for name in ("data", "heldout"):
            source = BUILTIN.get(getattr(settings, name), Path(getattr(settings, name)))
            prepare([source], tokenizer, Path(folder) / name, max_length=settings.max_length)
            texts[name] = Conversations.load(Path(folder) / name)
        reporter.say(
            f"draft model: {settings.layers} of {target.num_layers} layers, "
            f"{sum(p.numel() for p in draft.parameters() if p.requires_grad) / 1e6:.1f}M trained parameters, "
            f"{int(texts['data'].lengths.sum()):,} tokens"
        )
        before = _evaluate(draft, target, texts["heldout"], settings)
        started = time.monotonic()
        steps = train(draft, target, texts["data"], settings, reporter)
        trained = time.monotonic() - started
        after = _evaluate(draft, target, texts["heldout"], settings)
        prompt = texts["heldout"].ids(0)[None, :64]
    draft = draft.to(target.dtype).eval()
    report = {
        "settings": asdict(settings),
        "target": asdict(target.identity()),
        "steps": steps,
        "train_seconds": trained,
        "heldout": {"before": before, "after": after},
        "seconds_per_token": _seconds(target, draft, prompt),
    }
    out.mkdir(parents=True, exist_ok=True)
    draft.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _seconds(target: Target, draft: Any, prompt: Tensor) -> dict[str, float]:
    """One more drafted token, a plain step of the target, and their ratio."""
    drafter = DraftModelDrafter(Target(draft, name=target.name))
    costs = measure_costs(target, drafter, prompt, depth=4, rows=(1,), widths=(1,), repeats=7)
    own, plain = (costs.draft(4, 1) - costs.draft(1, 1)) / 3, costs.target(1)
    return {"draft": own, "target": plain, "ratio": own / plain}


def _parse(arguments: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser(
        prog="distill.py", description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--out", required=True, metavar="FOLDER", help="where the draft model goes")
    add("--layers", type=int, required=True, metavar="N", help="how many of the target's first layers it has")
    add("--target", default=Settings.target, metavar="NAME", help="(default: %(default)s)")
    add("--data", default=Settings.data, metavar="FILE", help="conversations of the target (default: %(default)s)")
    add("--heldout", default=Settings.heldout, metavar="FILE", help="others, to judge by (default: %(default)s)")
    add("--minutes", type=float, default=Settings.minutes, help="how long to train (default: %(default)s)")
    add("--steps", type=int, metavar="N", help="train so many steps instead, however long they take")
    add("--lr", type=float, default=Settings.lr, help="highest learning rate (default: %(default)s)")
    add("--batch-tokens", type=int, default=Settings.batch_tokens, metavar="N", help="(default: %(default)s)")
    add("--max-length", type=int, default=Settings.max_length, metavar="N", help="(default: %(default)s)")
    add("--dtype", default=Settings.dtype, choices=("bfloat16", "float32"), help="of the target and of what is saved")
    add("--seed", type=int, default=Settings.seed, help="of the order of the data (default: %(default)s)")
    settings = Settings(**vars(parser.parse_args(arguments)))
    if settings.minutes <= 0 or (settings.steps is not None and settings.steps < 1):
        parser.error("--minutes must be above 0, --steps 1 or more")
    return settings


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when a draft model was written, 2 for an error, 130 when stopped."""
    settings = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        report = distill(settings)
    except KeyboardInterrupt:
        print("stopped: nothing was written", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    before, after, seconds = report["heldout"]["before"], report["heldout"]["after"], report["seconds_per_token"]
    print(
        f"{settings.out}: {report['steps']} steps in {duration(report['train_seconds'])}; held out, loss "
        f"{before['loss']:.3f} → {after['loss']:.3f}, agreement {before['agreement']:.3f} → {after['agreement']:.3f}; "
        f"a drafted token costs {seconds['ratio']:.2f} of a plain step ({1e3 * seconds['draft']:.1f} ms)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
