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
def test_lejepa_in_one_pass_is_that_of_two_and_learns(capsys):
    """The losses of packed crops are those of a pass for each size; digits of a class come nearer to each other."""
    module = load("lejepa")
    short = ["--steps", "6", "--batch-size", "32"]
    together, _ = module.main(short)
    assert "256 crops of a step in 1,792 patches; padded 4,096" in capsys.readouterr().out
    apart, _ = module.main([*short, "--apart"])
    assert len(together) == 6 and together == pytest.approx(apart, abs=1e-3)
    _, random = module.main(["--steps", "0"])
    losses, learned = module.main(["--steps", "60"])
    assert learned > random + 0.05 and losses[-1] < 0.8 * losses[0]
