"""Recipes: defaults, files, overrides, and every refusal as one line with exit code 2 and nothing written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from heads.errors import HeadwayError, run_script
from train import medusa
from train.eagle import EagleRecipe
from train.medusa import DEFAULT_RECIPE, MedusaRecipe
from train.recipe import as_json, differing_key, read_recipe

RECIPES = sorted(DEFAULT_RECIPE.parent.glob("*.yaml"))


def read(*arguments: str) -> MedusaRecipe:
    return read_recipe(MedusaRecipe, DEFAULT_RECIPE, arguments)


def test_without_arguments_it_is_the_demo():
    assert as_json(read()) == as_json(read(f"--config={DEFAULT_RECIPE}"))
    written = yaml.safe_load(DEFAULT_RECIPE.read_text())
    assert read().out == written["out"] == "artifacts/demo/medusa"


def test_files_then_dotted_overrides(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "seed: 5\ndata: {features: store}\noptim: {lr: 1e-2, betas: [0.8, 0.9]}\nhead: {output: shared, draft_vocab_size: null}\n"
    )
    recipe = read("--config", str(path), "--optim.lr", "1e-4", "--head.num_heads=2", "--optim.max_steps", "7")
    assert recipe.seed == 5
    assert recipe.optim.lr == 1e-4
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.optim.max_steps == 7
    assert (recipe.head.output, recipe.head.num_heads, recipe.head.draft_vocab_size) == ("shared", 2, None)
    assert recipe.optim.epochs == MedusaRecipe().optim.epochs


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_are_whole(path: Path):
    """Every key is written out, so that a reader of the file sees the run."""
    written = yaml.safe_load(path.read_text())
    kind = EagleRecipe if "kind" in written["head"] else MedusaRecipe
    recipe = as_json(read_recipe(kind, path, []))
    optional = {
        "data": {"features", "conversations", "max_length", "online"},
        "optim": {"max_steps", "name", "spike"},
        "head": {"train_output", "parent", "taps", "noise", "fc_norm", "norm_output", "start"},
    }
    assert written.keys() == recipe.keys()
    for group, values in written.items():
        if isinstance(values, dict):
            assert recipe[group].keys() - values.keys() <= optional.get(group, set())


def test_print_config_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        read("--optim.lr=2e-3", "--print_config")
    assert stopped.value.code == 0
    path = tmp_path / "printed.yaml"
    path.write_text(capsys.readouterr().out)
    assert as_json(read(f"--config={path}")) == as_json(read("--optim.lr=2e-3"))


BAD = [
    ("--optim.lr=-1e-3", "optim.lr is -0.001; it must be above 0"),
    ("--optim.lr=.nan", "optim.lr is nan"),
    ("--optim.lr=fast", 'key "optim.lr"'),
    ("--optim.betas=[0.9,1.0]", "optim.betas is 1.0"),
    ("--optim.warmup=1.5", "optim.warmup is 1.5"),
    ("--optim.clip=0", "optim.clip is 0.0"),
    ("--optim.spike=1", "optim.spike is 1.0"),
    ("--optim.name=adam", 'key "optim.name"'),
    ("--pilot=0", "pilot is 0.0"),
    ("--optim.epochs=0", "optim.epochs is 0"),
    ("--optim.max_steps=0", "optim.max_steps is 0"),
    ("--optim.batch_tokens=0", "optim.batch_tokens is 0"),
    ("--optim.accumulation=0", "optim.accumulation is 0"),
    ("--optim.weight_decay=-1", "optim.weight_decay is -1.0"),
    ("--data.held_out=0", "data.held_out is 0"),
    ("--data.features=null", "data.features is None, data.conversations is None; name one of them"),
    (
        "--data.conversations=mine.jsonl",
        "data.conversations is mine.jsonl; name one of them, and set the other to null",
    ),
    ("--data.max_length=1", "data.max_length is 1"),
    ("--data.online.batch_tokens=0", "data.online.batch_tokens is 0"),
    ("--save.every=0", "save.every is 0"),
    ("--save.keep_last=0", "save.keep_last is 0"),
    ("--seed=-1", "seed is -1"),
    ("--head.draft_vocab_size=0", "head.draft_vocab_size is 0"),
    ("--head.num_heads=0", "head.num_heads is 0"),
    ("--head.num_layers=0", "head.num_layers is 0"),
    ('--head.losses={"kl": -1}', "head.losses.kl is -1.0"),
    ('--head.losses={"l2": 1}', "'l2' is unknown; known: ce, kl"),
    ("--head.losses={}", "names no loss on the drafted law"),
    ("--head.decay=0", "head.decay is 0.0"),
    ("--head.output=tied", 'key "head.output"'),
    ("--optim.learning_rate=1", "optim.learning_rate"),
    ("--config=nowhere.yaml", "nowhere.yaml"),
]


@pytest.mark.parametrize(("argument", "message"), BAD, ids=[argument for argument, _ in BAD])
def test_bad_values_are_one_line_and_exit_code_2(
    argument: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["medusa.py", argument])
    with pytest.raises(SystemExit) as stopped:
        run_script(medusa.main)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: recipe")
    assert message in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"), [("optimm: {lr: 1}", "optimm"), ("optim: {lrr: 1}", "lrr"), ("optim: [", "parsing")]
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(HeadwayError, match=message) as caught:
        read(f"--config={path}")
    assert str(path) in str(caught.value)


def test_differing_key_names_the_first_that_matters():
    base = as_json(MedusaRecipe())
    assert differing_key(base, as_json(MedusaRecipe())) is None
    changed = as_json(read("--config", str(DEFAULT_RECIPE), "--optim.betas=[0.5,0.6]"))
    assert differing_key(as_json(read()), changed) == "optim.betas"
    assert differing_key(as_json(read()), as_json(read("--log.wandb=off"))) is None
    assert differing_key(base, {**base, "seed": 1}) == "seed"
    assert differing_key({**base, "old": 1}, base) == "old"
