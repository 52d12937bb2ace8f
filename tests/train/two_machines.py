"""A run on two machines, by the configurations and the Slurm script that ship: two launches on loopback, or in two
network namespaces joined by a cable, when run as a script by root.

    python tests/train/two_machines.py FOLDER [--namespaces]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # run as a script, from wherever
    sys.path.insert(0, str(ROOT))
ACCELERATE = ROOT / "configs" / "accelerate"
NAMES, ADDRESSES = ("headstart-a", "headstart-b"), ("10.231.7.1", "10.231.7.2")

# What stands in for Slurm: the one says who the nodes are, and writes down what else it is asked, and what checkpoints
# there are by then; the other starts the command once for each node, and gives SIGTERM to all their processes, as Slurm
# does.
SCONTROL = """#!/usr/bin/env bash
[ "$1" = show ] && echo "$TEST_HOST" || echo "$@" $(ls "$TEST_FOLDER/run/checkpoints") >> "$TEST_FOLDER/scontrol.log"
"""
SRUN = """#!/usr/bin/env bash
shift
export TEST_BATCH=$PPID
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    prefix=
    [ -n "${TEST_NAMESPACES:-}" ] && prefix="ip netns exec $(echo $TEST_NAMESPACES | cut -d' ' -f$((node + 1)))"
    SLURM_NODEID=$node $prefix "$@" &
done
jobs=$(jobs -p)
trap 'signal_all $$' TERM
status=0
for job in $jobs; do
    while kill -0 "$job" 2>/dev/null; do wait "$job"; done
    wait "$job" || status=$?
done
exit $status
"""
SIGNAL_ALL = """#!{python}
import os, sys
import psutil

for process in psutil.Process(int(sys.argv[1])).children(recursive=True):
    if process.pid != os.getpid():
        try:
            process.terminate()
        except psutil.NoSuchProcess:
            pass
"""
LAUNCH = """#!{python}
import sys
from accelerate.commands.launch import main

del sys.argv[1]  # "launch"
main()
"""


def environment(
    folder: Path, port: int, kind: str, *, namespaces: bool = False, nodes: int = 2, processes: int = 1
) -> dict[str, str]:
    """What Slurm sets on a job of some nodes, with stand-ins for its commands, for CPU ``processes`` on each."""
    tools = folder / "slurm"
    tools.mkdir(parents=True, exist_ok=True)
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("signal_all", SIGNAL_ALL), ("accelerate", LAUNCH)):
        (tools / name).write_text(text.replace("{python}", sys.executable))
        (tools / name).chmod(0o755)
    cpu = {"DS_ACCELERATOR": "cpu"} if kind == "zero3_nodes" else {"ACCELERATE_USE_CPU": "true"}
    lines = {"TEST_NAMESPACES": " ".join(NAMES), "GLOO_SOCKET_IFNAME": "cable"} if namespaces else {}
    return {
        **os.environ,
        **cpu,
        **lines,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PROCESSES_PER_NODE": str(processes),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_ID": str(port - 20000),  # the script makes the port of it
        "SLURM_JOB_NODELIST": "nodes",
        "TEST_HOST": ADDRESSES[0] if namespaces else "127.0.0.1",
        "TEST_FOLDER": str(folder),
    }


def command(kind: str, *arguments: str) -> list[str]:
    """The Slurm script's command line for a configuration of ``configs/accelerate``."""
    return ["bash", str(ACCELERATE / "slurm.sh"), str(ACCELERATE / f"{kind}.yaml"), *arguments]


def cable(up: bool) -> None:
    """Two network namespaces and what joins them, made or taken away again.

    Raises:
        OSError: this machine does not let us, and why.
    """
    if shutil.which("ip") is None:
        raise OSError("no network namespaces here: there is no command `ip` (package iproute2)")
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
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            cable(False)
            told = " ".join(done.stderr.split()) or f"status {done.returncode}"
            raise OSError(f"no network namespaces here: `{' '.join(words)}` failed: {told}")


def main() -> int:
    """Train on both with DDP and with ZeRO-3; 0 when both runs are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--namespaces", action="store_true", help="two network namespaces instead of loopback")
    args = parser.parse_args()
    if args.namespaces:
        try:
            cable(True)
        except OSError as error:
            print(f"error: {error}; without --namespaces it runs on loopback", file=sys.stderr)
            return 2
    try:
        return train(args.folder, args.namespaces)
    finally:
        if args.namespaces:
            cable(False)


def train(folder: Path, namespaces: bool) -> int:
    """Both runs in a new folder; their status."""
    from tests.train.world import write_world

    folder.mkdir(parents=True)
    recipe = write_world(folder)
    for number, kind in enumerate(("nodes", "zero3_nodes")):
        environ = environment(folder, 29711 + number, kind, namespaces=namespaces)
        words = command(kind, "--config", str(recipe), "--output.folder", str(folder / kind))
        status = subprocess.run(words, env=environ, cwd=ROOT, check=False).returncode
        print(f"{kind}: {'ok' if not status else f'failed with status {status}'}")
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
