"""Times of a whole training, and the command."""

import json

import pytest
from cost_models import on_meta, run

from vitfast.cli import main
from vitfast.tools import cost
from vitfast.tools.cost import GIB, estimate, rates


def test_days_follow_from_the_step():
    found = estimate(on_meta("L/16"), rates("H100"), batch_size=4096, gpus=8, images=14 * 303e6, efficiency=0.5)
    seconds = 14 * 303e6 / 4096 * found["floor"]["step_seconds"]
    assert found["floor"]["train_seconds"] == pytest.approx(seconds) and found["predicted"][
        "train_seconds"
    ] == pytest.approx(2 * seconds)
    assert found["predicted"]["gpu_days"] == pytest.approx(2 * seconds * 8 / 86400)
    one = estimate(on_meta("L/16"), rates("H100"), batch_size=512)  # an eighth of the work, and the same update
    assert found["micro_batch"] == 512 and one["floor"]["step_seconds"] == pytest.approx(found["floor"]["step_seconds"])
    parts = estimate(on_meta("L/16"), rates("A100-40"), batch_size=4096)
    update = parts["operations"][-1]["backward_floor"]
    rest = sum(row["times"] * (row["forward_floor"] + row["backward_floor"]) for row in parts["operations"][:-1])
    assert parts["accumulate"] > 1 and parts["floor"]["step_seconds"] == pytest.approx(
        parts["accumulate"] * rest + update
    )


def test_recipe_gives_model_and_length(capsys):
    code, out, err = run(capsys, "--recipe", "plain-s16/imagenet-90ep", "--gpu", "rtx 4090", "--json")
    assert code == 0, err
    found = json.loads(out)
    hidden = 384 * 384 + 384  # of the head
    assert found["params"] == 22_050_664 - 384 - 197 * 384 + hidden  # no class token, fixed positions
    assert (found["model"], found["batch_size"], found["train_images"], found["device"]["gpu"]) == (
        "S/16",
        1024,
        90 * 1_281_167,
        "4090",
    )
    code, out, err = run(capsys, "--recipe", "finetune/cifar10", "--model", "L/16", "--json")
    found = json.loads(out)
    assert (found["model"], found["img_size"], found["train_images"], found["memory"]["state"]["optimiser state"]) == (
        "L/16",
        [384, 384],
        10_000 * 512,
        4 * found["params"],
    )


def test_text_tells_what_the_json_holds(capsys):
    args = ("--model", "B/16", "--gpus", 2, "--epochs", 300, "--images", 1281167)
    found, text = json.loads(run(capsys, *args, "--json")[1]), run(capsys, *args)[1]
    for wanted in (
        "86,567,656 parameters",
        "35.13 GFLOP",
        "data sheet",
        "batch 256 on 2 x H200",
        f"{found['floor']['images_per_second']:,.0f} images/s",
        f"{found['predicted']['gpu_days']:,.1f} GPU-days",
        "70% of that (assumed)",
        f"largest batch on each {found['largest_batch']:,}",
    ):
        assert wanted in text, (wanted, text)
    for row in found["operations"]:
        assert row["name"] in text
    assert max(map(len, text.splitlines())) < 240


def test_ceilings_of_a_file(capsys, tmp_path):
    path = tmp_path / "c.json"
    wanted = None
    for content in (
        dict(flops_per_second=6e14, bytes_per_second=4e12),
        dict(ceilings=dict(flops_per_second=6e14, bytes_per_second=4e12), other=[1]),
        dict(
            machine_info=dict(
                vitfast=dict(device="x", ceilings=dict(copy=4e12, bfloat16=6e14, float16=5e14, float8=None))
            ),
            benchmarks=[],
        ),
    ):
        path.write_text(json.dumps(content))
        found = json.loads(run(capsys, "--model", "B/16", "--ceilings", path, "--gpu", "4090", "--json")[1])
        assert found["device"] == dict(
            gpu="4090", flops_per_second=6e14, bytes_per_second=4e12, memory_bytes=24 * GIB, source="measured"
        )
        assert wanted in (None, found["floor"])
        wanted = found["floor"]


@pytest.mark.parametrize(
    "args, told",
    [
        ((), "give --model NAME or --recipe NAME"),
        (("--model", "B/17"), "unknown preset 'B/17'"),
        (("--model", "B/16", "--gpu", "H300"), "unknown GPU 'H300'; did you mean H200"),
        (("--model", "B/16", "--gpu", "Voodoo"), "H100-PCIe, H200, B200"),
        (("--model", "B/16", "--img-size", 100), "no multiple of the patch size"),
        (("--model", "B/16", "--epochs", 3), "both --epochs N and --images N"),
        (("--model", "R50x1", "--epochs", 3), "both --epochs N and --images N"),
        (("--model", "R50x1", "--epochs", -3, "--images", 3), "--epochs must be positive, got -3"),
        (("--model", "B/16", "--epochs", "nan", "--images", 1e6), "--epochs must be positive, got nan"),
        (("--model", "B/16", "--epochs", 1, "--images", "inf"), "--images must be positive, got inf"),
        (("--model", "R50x1", "--img-size", 0), "the model takes no image of 0 x 0 pixels"),
        (("--model", "R50x9"), "unknown model 'R50x9'; did you mean R50x"),
        (("--model", "R77x1"), "R101x1"),
        (("--model", "qqqq"), "known: Ti/16, S/16"),
        (("--model", "qqqq"), "R50x1, R50x2, R101x1, R152x1, R152x2, R200x3, timm:NAME"),
        (("--model", "timm:nothing"), "timm cannot build 'nothing'"),
        (("--model", "B/16", "--batch-size", 0), "batch_size must be positive"),
        (("--model", "B/16", "--efficiency", "nan"), "efficiency must be positive"),
        (("--model", "B/16", "--efficiency", 2), "efficiency must be at most 1"),
        (("--recipe", "no/such"), "unknown recipe"),
        (("--model", "B/16", "--ceilings", "nowhere.json"), "cannot be read"),
        (("--model", "B/16", "--ceilings", "LIST"), "cannot be read"),
        (("--model", "B/16", "--ceilings", "HALF"), "must hold positive numbers"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(capsys, tmp_path, args, told):
    (tmp_path / "LIST").write_text("[1, 2]")
    (tmp_path / "HALF").write_text('{"flops_per_second": 1e12}')
    code, out, err = run(capsys, *(tmp_path / a if a in ("LIST", "HALF") else a for a in args))
    assert code == 2 and told in err and err.count("\n") == 1 and not out, err


def test_help_names_every_gpu(capsys):
    for command in ("cost", "inspect"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        if command == "cost":
            words = capsys.readouterr().out.split()
            assert set(cost.GPUS) <= set(words) and {"--model", "--json", "--ceilings", "--efficiency"} <= set(words)
