"""The parts of ``gpu_heads.sh``: heads trained on one GPU for five minutes, what they are worth, and the loop's share.

Two figures say how little of the time a loop wastes. Of training: seconds of the target's pass and of the heads' pass,
each timed alone on the same batches, over seconds of a whole step; and operations a second over what plain matrix
products of the same dtype reach on the same device. Of decoding: seconds inside the target's and the heads' forwards
over all seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from heads.base import DraftHeads
from heads.formats.folder import new_folder
from heads.grow import Budget
from heads.target import Target
from infer import bench, evaluate
from infer.drafters import HeadsDrafter
from infer.generate import generate
from infer.prompts import read_prompts
from tests.train.world import Rows, write_world
from train.assemble import BUILTIN, find_recipe, make_heads
from train.config import RunConfig
from train.conversations import Conversations
from train.features import OnlineFeatures, pad_ids, run_target
from train.interrupt import StopRequest, Terminated, terminate
from train.launch import start
from train.loop import Trainer
from train.losses import make_criterion
from train.output import HEADS, REPORT
from train.peers import meter
from train.peers.inside.job import write_json
from train.progress import Reporter
from train.settings import load
from train.storage import Storage
from train.work import counted

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train" / "train_heads.py"
LONGEST = 420  # seconds that training may take, start and states included


@dataclass(frozen=True)
class Size:
    """How large everything is: for a GPU, or to try the script on a CPU.

    Attributes:
        seconds: of training; trial: steps that tell how many steps those are.
        settings: over the recipe's.
        prompts: timed, and before them those that warm up and choose the draft; ``tokens`` each at most.
        shape: configuration of the large target; ``large``: settings of its heads.
        texts, length: made-up conversations for it, and the tokens of each; steps: timed ones, ``batch`` tokens each.
    """

    seconds: float
    trial: int
    recipe: str
    settings: tuple[str, ...]
    prompts: int
    warmup: int
    tokens: int
    shape: str
    large: tuple[str, ...]
    texts: int
    length: int
    steps: int
    batch: int
    square: int


GPU = Size(
    seconds=300, trial=40, recipe="quickstart.yaml", prompts=20, warmup=5, tokens=96,
    settings=("--train.batch_tokens=8192", "--train.micro_tokens=8192", "--train.weight_decay=0.05"),
    shape="configs/shapes/llama-8b.json", large=("--heads.draft_vocab_size=32000",),
    texts=64, length=1024, steps=10, batch=16384, square=8192,
)  # fmt: skip
TINY = Size(
    seconds=0.05, trial=2, recipe="", prompts=2, warmup=1, tokens=6, settings=(),
    shape="", large=("--heads.draft_vocab_size=100",), texts=6, length=24, steps=2, batch=48, square=64,
)  # fmt: skip


class Work:
    """Where the parts write, on which device, and what they found."""

    def __init__(self, folder: Path, size: Size, device: torch.device) -> None:
        self.folder, self.size, self.device = folder, size, device
        self.found: dict[str, Any] = {}
        self.recipe, self.prompts = find_recipe(size.recipe) if size.recipe else None, BUILTIN["builtin:heldout"]
        if self.recipe is None:
            self.recipe = write_world(folder / "world")
            self.prompts = folder / "world" / "heldout.jsonl"

    def config(self, *settings: str) -> RunConfig:
        """The recipe with settings over it."""
        assert self.recipe is not None
        return load(self.recipe, [*self.size.settings, *settings])

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, action: Callable[[], object], times: int) -> float:
        """Seconds of one, after one that does not count."""
        action()
        self.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            action()
        self.synchronize()
        return (time.perf_counter() - began) / times


def train(work: Work) -> None:
    """Trains the recommended kind on the embedded target for five minutes."""
    steps, spent = work.size.trial, 0.0
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    for name in ("trial", "run"):
        out = work.folder / name
        settings = [*work.size.settings, "--eval.prompts=0", "--tracker.kind=none", f"--train.max_steps={steps}"]
        words = [sys.executable, str(SCRIPT), "--config", str(work.recipe), *settings, f"--output.folder={out}"]
        out.mkdir(parents=True)
        meter.run(words, environ, out / "log.txt", timeout=LONGEST)
        report = json.loads((out / REPORT).read_text(encoding="utf-8"))
        logged = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        rate = [line["train/tokens_per_second"] for line in logged if "train/tokens_per_second" in line][-1]
        spent = report["seconds"]
        if name == "trial":  # by the rate of its last steps: the first ones wait for memory and kernels
            each = report["data"]["tokens"] / max(1, round(report["data"]["tokens"] / work.config().train.batch_tokens))
            steps = max(1, round(work.size.seconds * rate / each))
    work.found["train"] = {
        "steps": steps,
        "seconds": spent,
        "tokens_per_second": rate,
        "heldout": report.get("heldout"),
        "heads": str(work.folder / "run" / HEADS),
    }
    print(f"  {steps} steps in {spent:.0f} s, {rate:,.0f} tokens a second")


def worth(work: Work) -> None:
    """What these heads are worth: tokens per round, and speed beside plain decoding in the same process."""
    size, config = work.size, work.config()
    target = Target.load(config.target.name, dtype=getattr(torch, config.target.dtype), device=work.device)
    heads = DraftHeads.from_pretrained(work.folder / "run" / HEADS, target, dtype=target.dtype)
    drafter = HeadsDrafter(heads)
    questions = evaluate.ask(read_prompts(work.prompts), target.tokenizer())
    warmup, asked = questions[: size.warmup], questions[size.warmup : size.warmup + size.prompts]
    budgets = {"chain 7": Budget.chain(7), "tree 32": Budget(32, 7, evaluate.TREE_WIDTH)}
    told = evaluate.evaluate(target, drafter, asked, budgets, evaluate.Settings(size.tokens))
    timing = bench.bench(target, drafter, asked, warmup, max_new_tokens=size.tokens)
    print(evaluate.table(told))
    print(bench.table(timing))
    work.found["worth"] = {"evaluation": told, "bench": timing}


def loop(work: Work) -> None:
    """How much of the loop's time is computing, with a random target of the shape of an 8B model."""
    size = work.size
    torch.manual_seed(0)
    if size.shape:
        shape = json.loads((ROOT / size.shape).read_text(encoding="utf-8"))
        with work.device:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.bfloat16)
        target = Target(model.requires_grad_(False), name="random, of the shape of an 8B model")
    else:
        target = Target.load(str(work.folder / "world" / "target"), dtype=torch.float32, device=work.device)
        target.model.requires_grad_(False)
    every = [*size.large, "--data.features=online", f"--train.batch_tokens={size.batch}", "--eval.prompts=0"]
    every += [f"--train.micro_tokens={size.batch}", "--eval.conversations=0", "--tracker.kind=none"]
    config = work.config(*every, f"--output.folder={work.folder / 'large'}", f"--train.max_steps={size.steps + 2}")
    texts = _texts(target.vocab_size, size.texts, size.length)
    heads = make_heads(config, target, texts, Reporter(False))
    work.found["loop"] = _training(work, config, heads, texts) | _decoding(work, heads, texts)
    told = work.found["loop"]
    print(f"  {told['tokens_per_second']:,.0f} tokens a second, {told['step_seconds'] * 1e3:.0f} ms a step")
    print(f"  of a step, inside target and heads: {told['inside']:.1%}")
    print(f"  {told['operations_per_second']:.2e} operations a second, {told['of_matrix_products']:.1%} of a product's")
    print(f"  of decoding, inside target and heads: {told['decoding_inside']:.1%}")


def _texts(vocabulary: int, count: int, length: int) -> Conversations:
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (count, length), generator=dice).tolist()
    rows = [{"input_ids": one, "loss_mask": [at >= length // 3 for at in range(length)]} for one in ids]
    return Conversations(Rows(rows), "made up")


def _training(work: Work, config: RunConfig, heads: DraftHeads, texts: Conversations) -> dict[str, float]:
    size, target = work.size, heads.target
    dtype, taps = getattr(torch, config.data.feature_dtype), tuple(heads.config.taps)
    accelerator: Accelerator = start(config)
    source = OnlineFeatures(target, texts, taps, dtype)
    trainer = Trainer(config, accelerator, heads, source, None, Reporter(False))
    plan = trainer.plan(0)
    step = plan[0]

    def whole() -> None:
        trainer.optimizer_step(step, StopRequest())
        trainer.progress.step += 1

    seconds = work.timed(whole, size.steps)
    ids, loss_mask, _ = (part.to(target.device) for part in pad_ids(texts, step))
    storage = Storage(len(taps), target.hidden_size, dtype)
    of_target = work.timed(lambda: run_target(target, taps, ids, loss_mask, storage), size.steps)
    batch, criterion = source.batch(step), make_criterion(config.train.loss)

    def of_heads() -> None:
        with torch.autocast(work.device.type, torch.bfloat16, enabled=config.train.precision == "bf16"):
            total = heads.loss(batch, criterion).total
        total.backward()

    own = work.timed(of_heads, size.steps)
    heads.zero_grad()
    operations = counted(of_heads) + counted(lambda: run_target(target, taps, ids, loss_mask, storage))
    heads.zero_grad()
    matrix = torch.randn(size.square, size.square, device=work.device, dtype=target.dtype)
    fastest = 2 * size.square**3 / work.timed(lambda: matrix @ matrix, size.steps)
    return {
        "step_seconds": seconds,
        "tokens_per_second": int(texts.lengths[step].sum()) / seconds,
        "target_seconds": of_target,
        "heads_seconds": own,
        "inside": (of_target + own) / seconds,
        "operations_per_second": operations / seconds,
        "matrix_products_per_second": fastest,
        "of_matrix_products": operations / seconds / fastest,
    }


def _decoding(work: Work, heads: DraftHeads, texts: Conversations) -> dict[str, float]:
    heads.to(heads.target.dtype).eval()
    ids = texts.ids(0)[None, : work.size.length // 2].to(heads.target.device)
    for _ in range(2):  # the first warms up
        out = generate(
            heads.target, ids, heads, budget=Budget.chain(5), max_new_tokens=work.size.tokens, do_sample=False
        )
    return {"decoding_inside": out.stats.forward_share, "decoding_tokens_per_round": out.stats.tokens_per_round}


PARTS: dict[str, Callable[[Work], None]] = {"train": train, "worth": worth, "loop": loop}


def main(words: list[str] | None = None) -> int:
    """Run the parts; 0 when all ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="a new folder (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny sizes")
    args = parser.parse_args(words)
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if not args.dry_run and not torch.cuda.is_available():
        print("FAIL: torch sees no GPU here", file=sys.stderr)
        return 1
    device, failed = torch.device("cpu" if args.dry_run else "cuda"), []
    where = "CPU (dry run)" if args.dry_run else torch.cuda.get_device_name()
    print(f"torch {torch.__version__} on {where}")
    with tempfile.TemporaryDirectory(prefix="headstart-heads-") as scratch, new_folder(args.out) as partial:
        work = Work(Path(scratch), TINY if args.dry_run else GPU, device)
        for name in args.parts or PARTS:
            print(f"{name}: {(PARTS[name].__doc__ or '').strip()}", flush=True)
            began, why, over = time.monotonic(), "", False
            try:
                PARTS[name](work)
            except (Exception, Terminated) as error:  # whatever it is, the others still run, if there is time
                why, over = f"{type(error).__name__}: {error}", isinstance(error, Terminated)
                failed.append(name)
            print(f"{name}: {'FAIL ' + why if why else 'done'} ({time.monotonic() - began:.0f} s)", flush=True)
            if over:
                break
        about = {"torch": torch.__version__, "device": where, "dry_run": args.dry_run, "failed": failed}
        write_json(partial / REPORT, about | work.found)
        if (heads := work.folder / "run" / HEADS).is_dir():
            shutil.copytree(heads, partial / HEADS)
    print(f"failed: {', '.join(failed)}" if failed else f"all ran; figures and heads: {args.out}")
    return bool(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    sys.exit(main())
