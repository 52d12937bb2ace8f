"""The parts of ``gpu_check.sh``: small runs on a GPU, each beside the run it has to equal.

Every part trains a tiny random target's heads for a few steps and compares what was logged. Losses of a GPU and of
fused kernels are those of plain ones to rounding, which the bounds allow for; another result exceeds them by far.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.gpu_commands import check_command
from tests.train.world import losses, write_world

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "train" / "train_heads.py")
LIMIT = 100  # seconds for one run
WIDE = ("--heads.options.head_dim", "16")  # the smallest that the fused attention takes


class Failed(Exception):
    """A part did not pass; says why."""


class Check:
    """A folder to train in, on a GPU or, for a dry run, on the CPU; or commands alone, which are not run."""

    def __init__(self, folder: Path, dry: bool, *, commands: bool = False) -> None:
        self.folder, self.dry, self.commands = folder, dry, commands
        self.recipe = write_world(folder)

    def launch(self, name: str, launcher: list[str], *arguments: str, cpu: bool = False, **environ: Any) -> list[float]:
        """Losses of a run by a launcher.

        Raises:
            Failed: it ended with an error, or not in time.
        """
        shutil.rmtree(self.folder / name, ignore_errors=True)
        words = [sys.executable, *launcher, SCRIPT, "--config", str(self.recipe), "--eval.prompts", "0", *arguments]
        on_cpu = {"CUDA_VISIBLE_DEVICES": ""} if cpu or self.dry else {}
        settings = {**os.environ, "OMP_NUM_THREADS": "2", **on_cpu, **environ}
        words += ["--output.folder", str(self.folder / name)]
        if self.commands:
            check_command(words, ROOT)
            print(f"  {' '.join(words)}")
            return [1.0]
        try:
            done = subprocess.run(
                words, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{name} took more than {LIMIT} s") from None
        if done.returncode:
            raise Failed(f"{name} ended with status {done.returncode}: {done.stderr.strip()[-1500:]}")
        return list(losses(self.folder / name).values())

    def alone(self, name: str, *arguments: str, cpu: bool = False) -> list[float]:
        """Losses of one plain process."""
        return self.launch(name, [], *arguments, cpu=cpu)

    def accelerate(self, name: str, config: str, *arguments: str, **environ: Any) -> list[float]:
        """Losses of one process by ``accelerate launch`` and a configuration that ships."""
        launcher = ["-m", "accelerate.commands.launch", "--config_file", f"configs/accelerate/{config}.yaml"]
        return self.launch(name, [*launcher, "--num_processes", "1", "--main_process_port", "0"], *arguments, **environ)


def alike(ours: list[float], theirs: list[float], bound: float, what: str) -> None:
    """Raise unless two runs logged the same.

    Raises:
        Failed: they did not.
    """
    if len(ours) != len(theirs) or not ours:
        raise Failed(f"{what}: {len(ours)} and {len(theirs)} steps")
    furthest = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    if not furthest <= bound:
        raise Failed(f"{what}: losses differ by {furthest:.2e}, more than {bound:.0e}: {ours} and {theirs}")
    print(f"  {what}: losses within {furthest:.1e}")


def plain(check: Check) -> None:
    """One process on the GPU trains what the CPU trains, online and from a cache, whole or in eight bits."""
    reference = check.alone("cpu", cpu=True)
    alike(check.alone("gpu"), reference, 1e-3, "GPU and CPU")
    alike(check.alone("online", "--data.features", "online"), reference, 1e-3, "online states on the GPU")
    eight = ("--data.feature_dtype", "float8_e4m3fn")
    alike(check.alone("fp8", *eight), reference, 5e-2, "states in eight bits")


def zero(check: Check) -> None:
    """DeepSpeed's stages, by the configurations that ship."""
    reference = check.alone("plain")
    cpu = {"DS_ACCELERATOR": "cpu"} if check.dry else {}
    places = [("zero1", "outside"), ("zero2", "inside"), ("zero3", "outside"), ("zero3", "sharded")]
    for config, place in places:
        found = check.accelerate(f"{config}-{place}", config, "--target.placement", place, **cpu)
        alike(found, reference, 1e-4, f"{config}, target {place}")


def fsdp2(check: Check) -> None:
    """FSDP2 by accelerate's launcher, with which it can only run on GPUs; a dry run takes torchrun's."""
    reference = check.alone("plain")
    for place in ("outside", "sharded"):
        words = ["--target.placement", place]
        if check.dry:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
            words += ["--train.engine", "fsdp2"]
            found = check.launch(f"fsdp2-{place}", torchrun, *words, ACCELERATE_USE_CPU="true")
        else:
            found = check.accelerate(f"fsdp2-{place}", "fsdp2", *words)
        alike(found, reference, 1e-4, f"FSDP2, target {place}")


def flex(check: Check) -> None:
    """The fused attention and its gradient are the plain one's."""
    if not check.commands:
        _attention(check)
    if not check.dry:
        wide = check.alone("wide", *WIDE)
        alike(check.alone("flex", *WIDE, "--train.attention", "flex"), wide, 2e-2, "training with it")


def _attention(check: Check) -> None:
    from heads.attention import attend_rows
    from heads.flex import attend_flex

    device = "cpu" if check.dry else "cuda"
    torch.manual_seed(0)
    b, heads, kv, r, t, d = 2, 4, 2, 160, 200, 16
    made = [
        torch.randn(*shape, device=device) for shape in ((b, heads, r, d), *[(b, kv, t, d)] * 2, *[(b, kv, r, d)] * 4)
    ]
    seen = torch.arange(t, device=device) <= torch.arange(r, device=device)[None, :, None] + 10
    gradients = []
    for function in (attend_flex, attend_rows):
        q, k0, v0, *own = (tensor.clone().requires_grad_(not check.dry) for tensor in made)
        read = function(q, k0, v0, seen.expand(b, -1, -1), [(own[0], own[1]), (own[2], own[3])])
        if not check.dry:
            read.square().sum().backward()
        gradients.append([read.detach(), *([] if check.dry else [x.grad for x in (q, k0, v0, *own)])])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    print("  result" + ("" if check.dry else " and gradients") + " are the plain attention's")


def liger(check: Check) -> None:
    """Liger's kernels in target and heads train what torch's train."""
    if check.dry and not check.commands:
        try:
            check.alone("liger", "--train.kernels", "liger")
        except Failed as refused:
            if "train.kernels is liger, which needs a GPU" in str(refused):
                print("  refused on a CPU, as it must be")
                return
            raise
        raise Failed("it ran on a CPU")
    reference = check.alone("plain", "--data.features", "online")
    found = check.alone("liger", "--data.features", "online", "--train.kernels", "liger")
    alike(found, reference, 2e-2, "training with it")


PARTS: dict[str, Callable[[Check], None]] = {
    "plain": plain, "zero": zero, "fsdp2": fsdp2, "flex": flex, "liger": liger,
}  # fmt: skip


def main(words: list[str] | None = None) -> int:
    """Run the parts; 0 when all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, as far as a CPU goes")
    parser.add_argument("--commands", action="store_true", help="print and check each command, and run none")
    args = parser.parse_args(words)
    unknown = set(args.parts) - PARTS.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if not args.dry_run and not args.commands and not torch.cuda.is_available():
        print("FAIL: torch sees no GPU here", file=sys.stderr)
        return 1
    if not args.commands:
        where = "CPU (dry run)" if args.dry_run else torch.cuda.get_device_name()
        print(f"torch {torch.__version__} on {where}")
    failed = []
    with tempfile.TemporaryDirectory(prefix="headstart-gpu-") as folder:
        check = Check(Path(folder), args.dry_run, commands=args.commands)
        for name in args.parts or PARTS:
            began, why = time.monotonic(), ""
            print(f"{name}: {(PARTS[name].__doc__ or '').strip()}", flush=True)
            try:
                PARTS[name](check)
            except Exception as error:  # whatever it is, the other parts still run
                why = f"{type(error).__name__}: {error}"
                failed.append(name)
            print(f"{name}: {'FAIL ' + why if why else 'pass'} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
