"""`cost`: FLOPs against torch's counter and the paper, bytes by hand, memory against what a run keeps, times and the command."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitfast import InputError, ViT, cost, keep, ops
from vitfast.cli import main
from vitfast.cost import GIB, Rates, estimate, flops_per_image, kept_bytes, operations, rates, state_bytes

# The rates that the budget of a B/16 step was made with: a product of 8192^3 and a copy, measured on an H200.
MEASURED = Rates("H200", 790e12, 4.3e12, 141 * GIB, "measured")
TINY = dict(img_size=(16, 24), patch_size=8, num_classes=7, embed_dim=32, depth=2, num_heads=2)


def on_meta(name: str, **options) -> ViT:
    with torch.device("meta"):
        return ViT.from_preset(name, **options)


def run(capsys, *args) -> tuple[int, str, str]:
    code = main(["cost", *map(str, args)])
    out = capsys.readouterr()
    return code, out.out, out.err


# ---- FLOPs


@pytest.mark.parametrize(
    "name, options",
    [
        ("B/16", {}),
        ("H/14", dict(img_size=518, depth=2)),
        ("S/16", dict(img_size=(80, 208), global_pool="avg", class_token=False, num_classes=10)),
        ("Ti/16", dict(reg_tokens=4, representation_size=100, in_chans=1, mlp_ratio=3.5, qkv_bias=False)),
        ("L/32", dict(num_classes=0, depth=3)),
        ("Nano/8", dict(img_size=24, patch_size=(6, 8), global_pool="")),
    ],
    ids=str,
)
def test_flops_are_those_torch_counts(name, options):
    with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):  # torch 2.11 does not count the CPU's flash attention
        model = ViT.from_preset(name, weight_init="skip", **options)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(2, model.in_chans, *model.patch_embed.img_size))
    assert 2 * flops_per_image(on_meta(name, **options)) == counter.get_total_flops() > 0


def test_flops_of_a_hybrid_are_those_torch_counts():
    model = ViT.from_preset("R50+B/16", img_size=(32, 48), depth=1, embed_dim=96)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.rand(1, 3, 32, 48))
    assert flops_per_image(model) == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    "name, epochs, published",
    [
        ("B/32", 7, 55),
        ("B/16", 7, 224),
        ("L/32", 7, 196),
        ("L/16", 7, 783),
        ("L/16", 14, 1567),
        ("H/14", 14, 4262),
        ("R50+B/32", 7, 106),
        ("R50+B/16", 7, 274),
        ("R50+L/16", 14, 1668),
    ],
)
def test_flops_are_the_papers(name, epochs, published):
    """Table 6 in exaFLOPs: JFT-300M's images, forward and backward."""
    assert 3 * flops_per_image(on_meta(name)) * 303e6 * epochs == pytest.approx(published * 1e18, rel=0.025)


def test_command_gives_the_papers_flops(capsys):
    code, out, _ = run(capsys, "--model", "L/16", "--epochs", 14, "--images", "303e6", "--json")
    found = json.loads(out)
    assert code == 0 and found["train_flops"] == pytest.approx(1567e18, rel=0.001) and found["params"] == 304_326_632
    assert found["train_flops"] == 3 * found["flops_per_image"] * 303e6 * 14 and found["largest_batch"] > 256


# ---- bytes and floors


def test_an_operation_by_hand():
    """QKV of two images, 7 tokens, width 32, in 16 bits; attention with two heads."""
    found = {op.name: op for op in operations(ViT(**TINY), 2)}
    qkv = found["QKV"]
    m, d, n = 14, 32, 96
    x, w, y, bias = m * d, d * n, m * n, n
    assert qkv.times == 2
    assert qkv.forward == ((2 * m * n * d, 2 * (x + w + bias + y)),)
    assert qkv.backward == ((2 * m * n * d, 2 * (y + w + x)), (2 * m * n * d, 2 * (y + x + w + bias)))
    attention = found["attention"]
    assert attention.forward == (
        (2 * (2 * 2 * 2 * 7 * 7 * 16), 2 * (3 + 1) * 14 * 32),
    )  # two products for 2 images and 2 heads of 16
    assert attention.backward == ((5 * (2 * 2 * 2 * 7 * 7 * 16), 2 * (3 + 1 + 1 + 3) * 14 * 32),)  # qkv, o, do -> dqkv
    row = qkv.row(Rates("", 1e6, 1e5, GIB, "measured"))
    assert row["forward_floor"] == pytest.approx(max(2 * m * n * d / 1e6, 2 * (x + w + bias + y) / 1e5))
    slow = qkv.row(Rates("", 1e6, 1e3, GIB, "measured"))
    assert (
        slow["backward_floor"] == pytest.approx(2 * (2 * (x + w + y) + bias) / 1e3)
        and slow["backward_floor"] > row["backward_floor"]
    )


def test_a_convolution_by_hand():
    """The stem of a hybrid whose ResNet has one unit: 7 x 7 filters at half the size, 1 x 1 and 3 x 3 ones at a quarter."""
    found = {op.name: op for op in operations(ViT(**TINY | dict(backbone=dict(layers=[1]))), 2)}
    image, half, quarter = 16 * 24, 8 * 12, 4 * 6  # pixels
    products = [
        (3 * 49, 64, image, half),
        (64, 256, quarter, quarter),
        (64, 64, quarter, quarter),
        (64 * 9, 64, quarter, quarter),
        (64, 256, quarter, quarter),
    ]
    flops = [2 * 2 * pixels * k * n for k, n, _, pixels in products]
    assert sorted(f for f, _ in found["ResNet"].forward if f) == sorted(map(float, flops))
    assert sum(f for f, _ in found["ResNet"].backward) == 2 * sum(flops) - flops[0]  # no gradient of the images
    assert found["ResNet"].forward[0] == (flops[0], 2 * (2 * 3 * image + 2 * 64 * half + 64 * 3 * 49))
    assert len(found["patch embedding"].backward) == 2  # but one of the map


def test_floors_of_a_base_layer():
    """ViT-B/16, batch 256, on an H200's measured rates, against the budget that the kernels were planned with: GFLOP, traffic in units of
    the tokens (B N D numbers), floors in microseconds, forward and backward; and a step of 38.7 ms."""
    budget = {
        "LayerNorm 1": ((0, 0), (2, 4), (36, 72)),
        "QKV": ((178, 357), (4, 8), (226, 452)),
        "attention": ((31, 76), (4, 8), (72, 144)),
        "projection + residual": ((59, 119), (3, 4), (75, 151)),
        "LayerNorm 2": ((0, 0), (2, 4), (36, 72)),
        "fc1 + GELU": ((238, 476), (9, 10), (301, 602)),
        "fc2 + residual": ((238, 476), (6, 18), (301, 602)),
    }
    found = estimate(on_meta("B/16"), MEASURED)
    rows, u = {row["name"]: row for row in found["operations"]}, 2 * 256 * 197 * 768
    for name, (gigaflops, traffic, floors) in budget.items():
        row = rows[name]
        assert (row["forward_flops"] / 1e9, row["backward_flops"] / 1e9) == pytest.approx(gigaflops, abs=0.6), name
        assert (round(row["forward_bytes"] / u), round(row["backward_bytes"] / u)) == traffic, name
        assert (1e6 * row["forward_floor"], 1e6 * row["backward_floor"]) == pytest.approx(floors, abs=1), name
    assert found["floor"]["step_seconds"] == pytest.approx(38.7e-3, rel=0.01) and found["micro_batch"] == 256
    assert found["floor"]["images_per_second"] == pytest.approx(6610, rel=0.01)
    assert found["predicted"]["step_seconds"] == pytest.approx(found["floor"]["step_seconds"] / 0.85)
    assert 5400 < found["predicted"]["images_per_second"] < 5800  # what was thought to be within reach


# ---- memory


@pytest.mark.parametrize("options", [{}, dict(residual_in_fp32=True), dict(global_pool="avg", fc_norm=False)], ids=str)
def test_memory_is_what_a_run_keeps_with_all_kept(options):
    model = ViT(**TINY | options, keep="all").half().train()
    found = kept(model, torch.randint(0, 256, (3, 3, 16, 24), dtype=torch.uint8))
    assert found == sum(kept_bytes(model, 3, 2, keep="all").values()) > sum(kept_bytes(model, 3, 2).values())
    model.set_keep("least")
    assert kept(model, torch.randint(0, 256, (3, 3, 16, 24), dtype=torch.uint8)) == sum(
        kept_bytes(model, 3, 2).values()
    )


def test_auto_keeps_all_where_it_fits(capsys):
    """B/16, batch 256: 5.6 GB more on an H200; what fits a 4090 in one part with the least alone stays in one part."""
    found = json.loads(run(capsys, "--model", "B/16", "--json")[1])
    u = 256 * 197 * 768 * 2
    assert found["keep"]["taken"] == "all" and found["keep"]["more_per_image"] * 256 == 12 * 6 * u
    assert found["memory"]["kept_per_image"]["activation"] * 256 == 12 * 4 * u
    both = found["keep"]["largest_batch"]
    assert both["all"] == found["largest_batch"] < both["least"]
    between = (both["all"] + both["least"]) // 2
    found = json.loads(run(capsys, "--model", "B/16", "--batch-size", between, "--json")[1])
    assert (found["keep"]["taken"], found["accumulate"]) == ("least", 1)
    found = json.loads(run(capsys, "--model", "B/16", "--batch-size", between, "--keep", "all", "--json")[1])
    assert (found["keep"]["taken"], found["accumulate"]) == ("all", 2)
    assert "keep='all' taken" in run(capsys, "--model", "B/16")[1]


def test_keep_has_no_effect_with_dropout():
    """Its blocks run on the smaller operations: nothing that backward writes goes away."""
    model = on_meta("B/16", proj_drop_rate=0.1)
    assert (
        operations(model, 2, keep="all")
        == operations(model, 2, keep="least")
        != operations(on_meta("B/16"), 2, keep="all")
    )
    found = [estimate(model, rates("H200"), keep=choice) for choice in keep.KEEPS]
    assert (
        found[0] == found[1] == found[2]
        and found[0]["keep"]["taken"] == "least"
        and found[0]["keep"]["more_per_image"] == 0
    )
    text = cost.as_text("B/16", found[0])
    assert (
        "keep has no effect with dropout" in text
        and "'all'" not in text
        and "keep=" in cost.as_text("B/16", estimate(on_meta("B/16"), rates()))
    )


def test_a_model_decides_once(monkeypatch):
    """By what is free, less what gradients and AdamW will take."""
    model = ViT(**TINY)
    needed = (
        sum(sum(keep.block_bytes(block, 21, 2, "all").values()) for block in model.blocks) + 21 * (32 + 2 * 128) * 2
    )
    needed += 12 * sum(p.numel() for p in model.parameters())
    gpu = torch.device("cuda")
    for free, wanted in ((needed / 0.9 + 1, "all"), (needed / 0.9 - 1, "least")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free - 2, 0))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
        assert keep.choose(model.blocks, model.parameters(), 21, 2, gpu) == wanted
    assert keep.choose(model.blocks, model.parameters(), 21, 2, torch.device("cpu")) == "least"
    model(torch.rand(1, 3, 16, 24))
    assert model.keep == "auto" and {block.keep for block in model.blocks} == {"least"} and "keep" not in model.config
    with pytest.raises(InputError, match="keep must be one of 'auto', 'all', 'least', got 'most'"):
        ViT(**TINY, keep="most")


def kept(model: ViT, images: torch.Tensor, autocast: torch.dtype | None = None) -> int:
    """Bytes of the storages that a forward pass on the kernels keeps for its backward, beside parameters and buffers."""
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            storages[storage.data_ptr()] = storage
        return tensor

    with (
        ops.use_kernels("on"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", autocast, enabled=autocast is not None),
    ):
        logits = model(images)
    assert logits.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({}, torch.float32),
        (dict(representation_size=24, depth=1), torch.float16),
        (dict(class_token=False, global_pool="avg", pos_embed="sincos2d", init_values=0.1), torch.float32),
        (dict(global_pool="avg", fc_norm=False, depth=1, num_heads=1), torch.float32),
        (dict(residual_in_fp32=True, reg_tokens=2), torch.float16),
        (dict(backbone=dict(layers=[1]), depth=1), torch.float32),
        (dict(pos_embed="learn2d", pos_embed_at="layers", num_heads=1), torch.float32),
    ],
    ids=str,
)
def test_memory_is_what_a_run_keeps(options, dtype):
    model = ViT(**TINY | options).to(dtype).train()
    images = torch.randint(0, 256, (3, 3, 16, 24), dtype=torch.uint8)
    assert kept(model, images) == sum(kept_bytes(model, 3, dtype.itemsize).values())


def test_memory_with_dropout():
    """A mask is a byte for each number on a GPU; on a CPU torch keeps it in the dtype of what it masks."""
    model = ViT(**TINY | dict(depth=1), proj_drop_rate=0.1, pos_drop_rate=0.1).train()
    wanted = kept_bytes(model, 3, 4)
    wanted["masks (dropout)"] *= 4
    assert kept(model, torch.randint(0, 256, (3, 3, 16, 24), dtype=torch.uint8)) == sum(wanted.values())


def test_memory_under_autocast_has_copies_of_the_linear_layers():
    model = ViT(**TINY | dict(depth=1)).train()
    images = torch.randint(0, 256, (8, 3, 16, 24), dtype=torch.uint8)
    wanted = sum(kept_bytes(model, 8, 2).values()) + state_bytes(model, 2)["16-bit copies"]
    biases = 2 * (model.embed_dim + model.num_classes)  # of the first and the last layer: nobody needs them in backward
    assert kept(model, images, torch.float16) == wanted - biases


def test_state_is_that_of_the_optimizer():
    model = ViT(**TINY)
    model(torch.rand(1, 3, 16, 24)).sum().backward()
    for name, optimizer in (
        ("adamw", torch.optim.AdamW(model.parameters(), lr=0.1)),
        ("sgd", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    ):
        optimizer.step()
        tensors = [t for state in optimizer.state.values() for t in state.values() if t is not None and t.dim() > 0]
        found = state_bytes(model, 4, name)
        assert found["optimiser state"] == sum(t.nbytes for t in tensors)
        assert (
            found["parameters"] == found["gradients"] == sum(p.grad.nbytes for p in model.parameters())
            and not found["16-bit copies"]
        )


def test_relative_positions_are_refused():
    with pytest.raises(InputError, match="relative positions"):
        flops_per_image(ViT(**TINY, pos_embed="relative"))


def test_the_largest_batch_is_the_last_that_fits():
    model = on_meta("B/16")
    found = estimate(model, rates("A100-40"), batch_size=10**6)
    largest, usable = found["largest_batch"], cost.USABLE * 40 * GIB

    def needed(batch):
        return (
            sum(state_bytes(model).values()) + sum(kept_bytes(model, batch).values()) + cost.working_bytes(model, batch)
        )

    assert needed(largest) <= usable < needed(largest + 1)
    assert found["micro_batch"] <= largest and found["micro_batch"] * found["accumulate"] >= 10**6
    assert estimate(on_meta("H/14"), Rates("", 1e12, 1e12, GIB, "data sheet"))["largest_batch"] == 0


# ---- a whole training


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
    assert found["params"] == 22_050_664 - 384 - 197 * 384  # no class token, fixed positions
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
        (("--model", "B/16", "--batch-size", 0), "batch_size must be positive"),
        (("--model", "B/16", "--efficiency", "nan"), "efficiency must be positive"),
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


@pytest.mark.gpu
def test_memory_of_a_run_on_a_gpu():
    model = ViT.from_preset("B/16").cuda().train()
    images = torch.randint(0, 256, (32, 3, 224, 224), dtype=torch.uint8, device="cuda")
    for _ in range(2):  # the first run allocates workspaces too
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(images)
        held = torch.cuda.memory_allocated() - before
        del logits
    wanted = kept_bytes(model, 32)
    assert held == pytest.approx(
        sum(wanted.values()) - wanted["images"] + state_bytes(model)["16-bit copies"], rel=0.02
    )
