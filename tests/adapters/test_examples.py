"""The examples run, and their losses are those without vitfast."""

import pytest
from examples import load

STEPS = 8


@pytest.mark.parametrize("library", ["transformers", "timm", "torchvision"])
@pytest.mark.slow
def test_each_example_trains(library, tmp_path, capsys):
    arguments = ["--steps", str(STEPS)]
    if library == "transformers":
        pytest.importorskip("accelerate", reason="Trainer needs Hugging Face's accelerate")
        module = load("hugging_face_trainer")
        arguments += ["--output", str(tmp_path)]
    else:
        module = load("library_model")
        arguments += ["--library", library]
    losses, accuracy = module.main(arguments)
    said = capsys.readouterr().out  # before the first call
    assert "9 parts on vitfast, 1 left" in said and said.count("decided at the first call") == 1
    plain_losses, plain_accuracy = module.main([*arguments, "--plain"])
    assert "on vitfast" not in capsys.readouterr().out
    assert len(losses) == STEPS and losses == pytest.approx(plain_losses, abs=2e-3)  # Trainer logs four digits
    assert accuracy == pytest.approx(plain_accuracy, abs=0.02)


@pytest.mark.slow
def test_two_crops_in_one_pass_are_those_of_two(capsys):
    """DINO's global and local crops as one list: the losses of a pass for each size, and fewer patches than padded."""
    module = load("two_crops")
    together, _ = module.main(["--steps", "6", "--drop-path", "0"])
    assert "320 crops of a step in 2,048 patches; padded 5,120" in capsys.readouterr().out
    apart, _ = module.main(["--steps", "6", "--drop-path", "0", "--apart"])
    assert len(together) == 6 and together == pytest.approx(apart, abs=1e-3)
    dropped, _ = module.main(["--steps", "6", "--drop-path", "0.5"])
    assert dropped != pytest.approx(together, abs=1e-2) and max(dropped) < 6
