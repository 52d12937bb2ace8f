"""A run on two machines, by the configurations and the Slurm script that ship: two launches on loopback, or in two
network namespaces joined by a cable, when run as a script by root.

    python tests/train/two_machines.py FOLDER [--namespaces]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ACCELERATE = ROOT / "configs" / "accelerate"
NAMES, ADDRESSES = ("headstart-a", "headstart-b"), ("10.231.7.1", "10.231.7.2")

# What stands in for Slurm: the one says who the nodes are, the other starts the command once for each.
SCONTROL = """#!/usr/bin/env bash
[ "$1" = show ] && echo "$TEST_HOST" || echo "$@" >> "$TEST_FOLDER/scontrol.log"
"""
SRUN = """#!/usr/bin/env bash
shift
trap 'kill -TERM $(jobs -p)' TERM
status=0
for node in 0 1; do
    prefix=
    [ -n "${TEST_NAMESPACES:-}" ] && prefix="ip netns exec $(echo $TEST_NAMESPACES | cut -d' ' -f$((node + 1)))"
    SLURM_NODEID=$node $prefix "$@" &
done
for job in $(jobs -p); do wait "$job" || status=$?; done
exit $status
"""


def environment(folder: Path, port: int, kind: str, *, namespaces: bool = False) -> dict[str, str]:
    """What Slurm sets on a job of two nodes, with stand-ins for its commands, for CPU processes."""
    tools = folder / "slurm"
    tools.mkdir(parents=True, exist_ok=True)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    accelerate = tools / "accelerate"
    accelerate.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -m accelerate.commands.accelerate_cli "$@"\n')
    accelerate.chmod(0o755)
    cpu = {"DS_ACCELERATOR": "cpu"} if kind == "zero3_nodes" else {"ACCELERATE_USE_CPU": "true"}
    lines = {"TEST_NAMESPACES": " ".join(NAMES), "GLOO_SOCKET_IFNAME": "cable"} if namespaces else {}
    return {
        **os.environ,
        **cpu,
        **lines,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PROCESSES_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": str(port - 20000),  # the script makes the port of it
        "SLURM_JOB_NODELIST": "nodes",
        "TEST_HOST": ADDRESSES[0] if namespaces else "127.0.0.1",
        "TEST_FOLDER": str(folder),
    }


def command(kind: str, *arguments: str) -> list[str]:
    """The Slurm script's command line for a configuration of ``configs/accelerate``."""
    return ["bash", str(ACCELERATE / "slurm.sh"), str(ACCELERATE / f"{kind}.yaml"), *arguments]


def cable(up: bool) -> None:
    """Two network namespaces and what joins them, made or taken away again."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
    if not up:
        return
    one, two = NAMES
    made = [["ip", "netns", "add", name] for name in NAMES]
    made += [["ip", "link", "add", "cable", "netns", one, "type", "veth", "peer", "name", "cable", "netns", two]]
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        made += [["ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable"]]
        made += [["ip", "-n", name, "link", "set", device, "up"] for device in ("cable", "lo")]
    for words in made:
        subprocess.run(words, check=True)


def main() -> int:
    """Train on both with DDP and with ZeRO-3; 0 when both runs are done."""
    sys.path.insert(0, str(ROOT))
    from tests.train.world import write_world

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--namespaces", action="store_true", help="two network namespaces instead of loopback")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    recipe = write_world(args.folder)
    if args.namespaces:
        cable(True)
    try:
        for number, kind in enumerate(("nodes", "zero3_nodes")):
            environ = environment(args.folder, 29711 + number, kind, namespaces=args.namespaces)
            words = command(kind, "--config", str(recipe), "--output.folder", str(args.folder / kind))
            status = subprocess.run(words, env=environ, cwd=ROOT, check=False).returncode
            print(f"{kind}: {'ok' if not status else f'failed with status {status}'}")
            if status:
                return status
    finally:
        if args.namespaces:
            cable(False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
