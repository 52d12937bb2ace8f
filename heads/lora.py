"""Low-rank adapters (LoRA, arXiv 2106.09685) that stay outside the model they adapt: PEFT makes them and names them.

PEFT puts its layers in place of the model's own. Here they are made on a stand-in that has the model's linear layers by
name and size alone, and kept apart: the model stays as it is, and a hook adds what a row is to get
(:mod:`heads.gate`). Names are those of an adapter file of PEFT, ``base_model.model.LAYER.lora_A.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heads.config import ConfigError
from heads.target import Target

WRAPPED = "base_model.model."  # how PEFT's wrapper around a model calls what is inside


class LoraPair(nn.Module):
    """What one linear layer's adapter adds: scaling · B(A(x)).

    Args:
        a, b, dropout, scaling: of PEFT's layer.
    """

    def __init__(self, a: nn.Linear, b: nn.Linear, dropout: nn.Module, scaling: float) -> None:
        super().__init__()
        self.lora_A, self.lora_B, self.dropout, self.scaling = a, b, dropout, scaling

    def forward(self, x: Tensor) -> Tensor:
        """(…, in) → (…, out)."""
        weight = self.lora_A.weight
        own = x if torch.is_autocast_enabled(x.device.type) else x.to(weight)
        return (self.lora_B(self.lora_A(self.dropout(own))) * self.scaling).to(x)


def linear_layers(target: Target) -> dict[str, nn.Module]:
    """The linear layers inside a target's decoder layers, by the name they have in the model without a wrapper.

    An adapted or quantized one counts as a whole; experts that are no modules of their own are not among them.
    """
    root = next(name for name, module in target.model.named_modules() if module is target.layers)
    return {name.removeprefix(WRAPPED): module for name, module in _linear(target.layers, root)}


def _linear(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if sizes(module) is not None:
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _linear(child, f"{name}.{child_name}")


def sizes(module: Any) -> tuple[int, int] | None:
    """Width of what a linear layer reads and gives; None for anything else."""
    for names in (("in_features", "out_features"), ("nx", "nf")):  # the latter are GPT-2's
        found = tuple(getattr(module, name, None) for name in names)
        if all(isinstance(size, int) for size in found):
            return found  # type: ignore[return-value]
    return None


def make_adapter(
    layers: Mapping[str, nn.Module], *, r: int, alpha: float, dropout: float, rslora: bool, modules: Sequence[str]
) -> dict[str, LoraPair]:
    """Fresh adapters by layer name, of those of ``layers`` that ``modules`` names as PEFT's ``target_modules`` do.

    Raises:
        ConfigError: PEFT refuses the settings, no layer has such a name, or these are no names.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes a second, which only this kind of heads needs

    stand_in = tree({name: _bare(module) for name, module in layers.items()})
    if not isinstance(modules, (list, tuple)) or not all(isinstance(name, str) for name in modules):
        raise ConfigError(f"lora options: lora_modules must be a list of layers' names, not {str(modules)[:80]!r}")
    try:
        config = LoraConfig(r=r, lora_alpha=alpha, lora_dropout=dropout, use_rslora=rslora, target_modules=[*modules])  # type: ignore[arg-type]
        inject_adapter_in_model(config, stand_in)
    except ValueError as error:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"lora options: {said} (linear layers of this target: {known})") from None
    pairs = {}
    for name in layers:
        made: Any = stand_in.get_submodule(name)
        if hasattr(made, "lora_A"):
            parts = made.lora_A["default"], made.lora_B["default"], made.lora_dropout["default"]
            pairs[name] = LoraPair(*parts, float(made.scaling["default"]))
    return pairs


def tree(leaves: Mapping[str, nn.Module]) -> nn.Module:
    """Modules under dotted names."""
    root = nn.Module()
    for name, leaf in leaves.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.add_module(last, leaf)
    return root


def _bare(module: nn.Module) -> nn.Linear:
    """A linear layer of the same sizes whose weight takes no memory."""
    found = sizes(module)
    assert found is not None
    linear = nn.Linear(*found, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.zeros(()).expand(found[1], found[0]), requires_grad=False)
    return linear
