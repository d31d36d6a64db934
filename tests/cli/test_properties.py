"""Settings drawn at random: they are taken, or one line says why not; never a traceback."""

import dataclasses
import random

import numpy as np
import pytest
import yaml
from commands import run_cli
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from vitfast import InputError
from vitfast.data.transforms import transforms
from vitfast.run.config import AUTO_AUGMENT, FIELDS, Config, as_plain
from vitfast.train.recipes import resolve

EDGES = ["", "a\0b", "9" * 5000, *"-1 0 1 2 0.5 0.999 1e-3 1e400 nan inf none true x 1,1 0.5,1 0,0,0 2,3".split()]
VALUES = st.one_of(
    st.sampled_from(EDGES),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    st.lists(st.floats() | st.integers() | st.text(max_size=3), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
# How long a run is, is given: what it does with a length is not the question.
SHORT = dict(recipe="digits", data="digits", steps=1, batch_size=4, device="cpu", train_images=20)
RUN_FIELDS = sorted(set(FIELDS) - {"steps", "epochs", "output", "device"})


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.sampled_from(FIELDS), VALUES)
def test_a_field_takes_a_value_or_names_itself(name, value):
    layer = {"recipe": "digits", name: value}
    try:
        config = resolve("pretrain", layer)
    except InputError as error:
        asked = "recipe" if name == "name" else "length" if name in ("epochs", "steps") and value is None else name
        assert asked in str(error) or "no length" in str(error), error
        assert len(str(error)) < 4000
        return
    again = yaml.safe_load(yaml.safe_dump(as_plain(config)))
    assert resolve("pretrain", {k: v for k, v in again.items() if k != "name"}, {"recipe": "digits"} | again) == config


@settings(max_examples=200, deadline=None, derandomize=True)
@given(VALUES, VALUES)
def test_a_config_file_takes_any_names_and_recipes(name, recipe):
    layer = {"recipe": recipe, (str(name) if isinstance(name, (list, dict)) else name): 1}
    try:
        resolve("pretrain", layer)
    except InputError as error:
        assert "unknown" in str(error) or "must" in str(error)


def test_no_config_holds_a_wrong_value_however_it_is_made():
    config = resolve("pretrain", dict(recipe="digits"))
    with pytest.raises(InputError, match="ema_decay must lie in"):
        dataclasses.replace(config, ema_decay=2)
    with pytest.raises(InputError, match="label_smoothing must be a finite number"):
        Config(label_smoothing="much")
    assert Config(seed="9007199254740993").seed == 9007199254740993  # not by way of float


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.from_regex(AUTO_AUGMENT, fullmatch=True).filter(bool))
@example("augmix-m20")  # draws posterize with 0 bits
def test_every_policy_that_is_taken_is_one_of_timm(policy):
    train, _ = transforms(resolve("pretrain", dict(recipe="digits", auto_augment=policy)), (16, 16))
    random.seed(0)
    np.random.seed(0)
    assert train(Image.new("RGB", (16, 16), (10, 200, 90))).shape == (3, 16, 16)


def one_step(capsys, output, name: str, value: str) -> None:
    """Trains one step with a setting; it works, or one line names what is wrong."""
    given = {**SHORT, "output": output}
    given = {k: v for k, v in given.items() if k != name}
    train_images = f"train_images={given.pop('train_images', 20)}"
    flags = [text for k, v in given.items() for text in (f"--{k.replace('_', '-')}", v)]
    code, _, err = run_cli(capsys, "pretrain", *flags, "--set", train_images, f"{name}={value}")
    assert code in (0, 1, 2) and "Traceback" not in err, (name, value, err)
    if code:
        assert err.strip().splitlines()[-1].startswith("vitfast: error: "), (name, value, err)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(RUN_FIELDS), st.sampled_from(EDGES))
def test_one_step_runs_or_one_line_says_why_not(capsys, tmp_path_factory, name, value):
    one_step(capsys, tmp_path_factory.mktemp("run"), name, value)


@pytest.mark.long
@pytest.mark.parametrize("name", RUN_FIELDS)
def test_one_step_with_every_field_at_every_edge(capsys, tmp_path_factory, name):
    for value in [*EDGES, "1e9", "1000000000", "999999999999"]:
        one_step(capsys, tmp_path_factory.mktemp("run"), name, value)
