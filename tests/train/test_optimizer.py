"""The optimizers: which weights each moves and how far, that a killed run goes on, and where one is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from heads.kinds import build, make_config
from tests.train.compare import killed_at, same
from tests.train.conftest import Launch
from tests.train.world import log_of, losses, run, tiny_target
from train.config import RunConfig, TrainConfig
from train.engines import start_engine
from train.optimizer import MUON, Several, make_optimizer, parted
from train.settings import SettingsError
from train.step import Stepper

MUON_ON = TrainConfig(optimizer="muon", lr=1e-2)
EVENED = ("--train.optimizer", "muon", "--train.row_beta", "0.9")
EAGLE = {"fc.weight", *(f"layer.{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))}
BY_KIND = {
    "eagle": EAGLE,
    "medusa": {f"blocks.{depth}.0.linear.weight" for depth in range(3)},
    "block": {
        "fc.weight",
        *(f"layers.{n}.{name}_proj.weight" for n in range(2) for name in ("q", "k", "v", "o", "gate", "up", "down")),
    },
    "hydra": {
        *(f"blocks.{depth}.0.{name}.weight" for depth in range(3) for name in ("linear", "residual")),
        *(f"layer.{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")),
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "block": {"markov_rank": 8, "confidence": True, "own_output": True},
    "medusa": {"own_output": True},
}


def heads_of(kind: str) -> Any:
    target = tiny_target()
    taps, more = (1, 2, 3) if kind in ("eagle", "block") else None, OPTIONS.get(kind, {})
    heads = build(make_config(kind, target, lookahead=3, taps=taps, draft_vocab_size=50, options=more), target)
    heads.set_draft_vocabulary(torch.arange(50))
    heads.initialize()
    return heads


@pytest.mark.parametrize("kind", BY_KIND)
def test_muon_moves_the_matrices_that_states_go_through(kind: str) -> None:
    heads = heads_of(kind)
    names = {id(weight): name for name, weight in heads.named_parameters()}
    moved = parted(MUON_ON, heads, heads.parameters())
    assert {names[id(weight)] for weight in moved[MUON]} == BY_KIND[kind]
    assert sum(map(len, moved.values())) == len(names), "each is moved by one"


def test_adamw_alone_is_torchs_own() -> None:
    heads = heads_of("eagle")
    made = make_optimizer(TrainConfig(lr=0.5, beta1=0.8, beta2=0.7, weight_decay=0.1), heads)(heads.parameters())
    assert type(made) is torch.optim.AdamW and len(made.param_groups) == 1
    group = made.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.7), 0.1)


def step_of(
    settings: TrainConfig,
    gradients: list[dict[str, torch.Tensor]],
    before: tuple[dict[str, torch.Tensor], Any] | None = None,
) -> tuple[dict[str, torch.Tensor], Any]:
    """Steps with these gradients, from weights of 0 or on from others' weights and optimizer → both."""
    heads = heads_of("eagle").double()
    made = make_optimizer(settings, heads)(heads.parameters())
    weights = dict(heads.named_parameters())
    for name, weight in weights.items():
        weight.data = before[0][name].detach().clone() if before else torch.zeros_like(weight)
    if before:
        made.load_state_dict(before[1].state_dict())
    for gradient in gradients:
        for name, value in gradient.items():
            weights[name].grad = value.clone()
        made.step()
    return weights, made


def test_a_step_of_muon_is_as_long_as_adamws_and_turns_nothing() -> None:
    """Its singular vectors are the gradient's; its values are alike, at 0.2·√(longer side) of the learning rate."""
    gradient = torch.randn(32, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(gradient, full_matrices=False)
    shape = heads_of("eagle").fc.weight.shape
    assert shape == (32, 96) and float(s[0] / s[-1]) > 2
    weights, _ = step_of(MUON_ON, [{"fc.weight": gradient, "norm.weight": torch.full((32,), 3.0).double()}])
    core = u.T @ (-weights["fc.weight"].detach() / (1e-2 * 0.2 * 96**0.5)) @ v.T
    values = core.diagonal()
    assert float((core - values.diag()).abs().max()) < 0.02  # it computes in bfloat16
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    assert weights["norm.weight"].tolist() == pytest.approx([-1e-2] * 32), "AdamW's first step is the learning rate"


def test_evened_rows_are_alike_and_the_step_is_as_long_as_any() -> None:
    """What a row of Muon's step is over the running mean square of that row's steps, recomputed by hand."""
    dice = torch.Generator().manual_seed(2)
    name, unit = "layer.gate_proj.weight", 1e-2
    shape = heads_of("eagle").get_parameter(name).shape
    assert shape[0] > shape[1], "a tall matrix: Muon leaves its rows unlike"
    steps = [
        {name: torch.randn(shape, dtype=torch.float64, generator=dice) * torch.rand(shape[0], 1)} for _ in range(3)
    ]
    even, beta = TrainConfig(optimizer="muon", lr=1e-2, row_beta=0.9, weight_decay=0.5), 0.9
    before = {"plain": torch.zeros(shape).double(), "even": torch.zeros(shape).double()}
    mean = torch.zeros(shape[0], 1).double()
    for count in range(1, 4):
        plain = step_of(MUON_ON, steps[:count])[0][name].detach()
        evened = step_of(even, steps[:count])[0][name].detach()
        way = (plain - before["plain"]) / unit
        mean = beta * mean + (1 - beta) * way.square().mean(1, keepdim=True)
        wanted = way / mean.sqrt()
        wanted *= 0.2 / wanted.square().mean().sqrt()
        found = (evened - before["even"] * (1 - 1e-2 * 0.5)) / unit
        torch.testing.assert_close(found, wanted)
        lengths = [float(m.norm(dim=1).max() / m.norm(dim=1).min()) for m in (way, found)]
        assert lengths[0] > 1.5
        if count == 1:
            assert lengths[1] == pytest.approx(1.0), "no memory yet: all rows alike"
        before = {"plain": plain, "even": evened}


def test_rows_that_never_move_stay_numbers() -> None:
    gradient = torch.zeros(32, 96).double()
    gradient[3] = 1.0
    weights, _ = step_of(TrainConfig(optimizer="muon", lr=1e-2, row_beta=0.95), [{"fc.weight": gradient}])
    assert weights["fc.weight"].isfinite().all() and float(weights["fc.weight"][3].abs().min().detach()) > 0
    still, _ = step_of(
        TrainConfig(optimizer="muon", lr=1e-2, row_beta=0.95), [{"fc.weight": torch.zeros(32, 96).double()}]
    )
    assert not still["fc.weight"].any()


def test_momentum_and_decay_are_the_settings() -> None:
    one, other = torch.zeros(32, 96).double(), torch.zeros(32, 96).double()
    one[0, 0], other[1, 1] = 1.0, 1.0
    steps = [{"fc.weight": one}, {"fc.weight": other}]
    forgets, _ = step_of(TrainConfig(optimizer="muon", lr=1e-2, momentum=0.0), steps)
    keeps, _ = step_of(TrainConfig(optimizer="muon", lr=1e-2, momentum=0.9), steps)
    assert float((keeps["fc.weight"][0, 0] / forgets["fc.weight"][0, 0]).detach()) > 1.3, "the first goes on"
    decays, _ = step_of(TrainConfig(optimizer="muon", lr=1e-2, momentum=0.0, weight_decay=50.0), steps)
    ratio = decays["fc.weight"][0, 0] / forgets["fc.weight"][0, 0]
    assert float(ratio.detach()) == pytest.approx(0.5), "half of it is taken by the second step: 1 - 1e-2 · 50"


def test_the_factor_is_of_muons_rate_alone(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[list[float]] = []
    original = Several.step

    def watched(self: Several, closure: Any = None) -> None:
        rates.append([group["lr"] for group in self.param_groups])
        original(self, closure)

    monkeypatch.setattr(Several, "step", watched)
    settings = ("--train.optimizer", "muon", "--train.muon_factor", 4, "--train.schedule", "linear")
    launch(*settings, "--train.max_steps", 3, "--eval.prompts", 0)
    assert rates == [pytest.approx([12e-3 * left, 3e-3 * left]) for left in (1, 2 / 3, 1 / 3)]
    assert [line["train/lr"] for line in log_of(world / "run") if "train/lr" in line] == [r[1] for r in rates]


def test_several_go_on_from_what_was_saved() -> None:
    dice = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=dice).double()  # noqa: E731
    steps = [{"fc.weight": normal(32, 96), "norm.weight": normal(32)} for _ in range(4)]
    whole, _ = step_of(MUON_ON, steps)
    half = step_of(MUON_ON, steps[:2])
    assert isinstance(half[1], Several)
    on, made = step_of(MUON_ON, steps[2:], half)
    for name, weight in on.items():
        assert torch.equal(weight, whole[name]), name
    fresh, _ = step_of(MUON_ON, steps[2:], (half[0], step_of(MUON_ON, [])[1]))
    assert not torch.equal(fresh["fc.weight"], whole["fc.weight"]) and not torch.equal(
        fresh["norm.weight"], whole["norm.weight"]
    ), "its state counts"
    with pytest.raises(ValueError, match="no closure"):
        made.step(lambda: 0.0)


def test_a_killed_run_with_muon_goes_on_bit_for_bit(world: Path, launch: Launch) -> None:
    recipe = (*EVENED, "--train.max_steps", 4, "--train.save_every", 1, "--eval.prompts", 0)
    launch(*recipe, "--output.folder", world / "whole")
    with killed_at(Stepper, "batch", 4):
        launch(*recipe)
    launch(*recipe)
    same(world / "whole", world / "run")
    launch(*recipe, "--train.optimizer", "adamw", "--output.folder", world / "adamw")
    lines = [log_of(world / name) for name in ("run", "adamw")]
    losses = [[line["train/loss"] for line in told if "train/loss" in line] for told in lines]
    assert losses[0][0] == losses[1][0] and losses[0][1] != losses[1][1]
    with pytest.raises(ValueError, match="optimizer"):
        launch(*recipe, "--train.optimizer", "adamw")


@pytest.mark.parametrize("engine", ["launched", "fsdp2"])
def test_two_processes_with_muon_are_one(engine: str, world: Path, launch: Launch) -> None:
    """Within what its bfloat16 makes of the order of sums, also behind a stop; FSDP2 puts matrices together where they
    are multiplied."""
    settings = (*EVENED, "--train.schedule", "constant", "--eval.prompts", "0")
    words: list[str | Path] = ["--config", world / "recipe.yaml", *settings, "--train.engine", engine]
    for steps in ("2", "4"):
        done = run([*words, "--train.max_steps", steps, "--output.folder", world / "two"], processes=2)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed: step 2 of 4" in done.stderr
    launch(*settings, "--train.max_steps", "4", "--output.folder", world / "one")
    assert list(losses(world / "two").values()) == pytest.approx(list(losses(world / "one").values()), rel=2e-3)


def test_muon_is_refused_where_no_matrix_is_whole() -> None:
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(
        SettingsError, match=r"train\.optimizer muon needs whole matrices, and DeepSpeed .* adamw, or launch"
    ):
        start_engine(RunConfig(train=MUON_ON), accelerator, None, None)  # type: ignore[arg-type]
