"""Whole models on interpreted kernels.

Training, compile, autocast, checkpointing, export, and two processes equal to one.
"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checks import assert_close, gradients, randomize
from processes import done, ranks
from timm.models.vision_transformer import VisionTransformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from vitfast import ViT, interpreter, ops
from vitfast.cli import main
from vitfast.kernels.launch import launches_made

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")
SMALL = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)


def test_kernels_really_run_and_equal_timm():
    model = randomize(ViT(**SMALL, reg_tokens=1, init_values=0.5))
    peer = VisionTransformer(**SMALL, reg_tokens=1, init_values=0.5)
    peer.load_state_dict(model.state_dict())
    x, upstream = torch.randn(3, 3, 16, 16), torch.randn(3, 5)
    before = launches_made()
    with ops.use_kernels("on"):
        out = model(x)
        mine = gradients(model, out, upstream)
    assert launches_made() - before > 20
    assert_close(out, peer(x), atol=1e-5)
    for name, theirs in gradients(peer, peer(x), upstream).items():
        assert_close(mine[name], theirs, atol=1e-4, rtol=1e-4, name=name)


def test_uint8_images_through_the_kernels():
    model = randomize(ViT(**SMALL, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25)))
    raw = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    expected, wanted = model(raw), gradients(model, model(raw), torch.ones(2, 5))
    with ops.use_kernels("on"):
        out = model(raw)
        assert_close(out, expected, atol=1e-5)
        for name, grad in gradients(model, out, torch.ones(2, 5)).items():
            assert_close(grad, wanted[name], atol=1e-4, rtol=1e-4, name=name)


@pytest.mark.slow(20)
def test_fifty_training_steps_follow_plain_pytorch():
    losses = {}
    images, labels = torch.randn(50, 2, 3, 8, 8), torch.randint(0, 5, (50, 2))
    for mode in ("on", "off"):
        torch.manual_seed(1)
        model = ViT(
            img_size=8,
            patch_size=4,
            embed_dim=16,
            depth=2,
            num_heads=1,
            num_classes=5,
            weight_init="jax",
            drop_path_rate=0.1,
        )
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses[mode] = []
        with ops.use_kernels(mode):
            for x, y in zip(images, labels):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[mode].append(loss.item())
    assert losses["on"] == pytest.approx(losses["off"], abs=1e-4)
    assert losses["on"][0] != losses["on"][-1]


@pytest.mark.slow(15)
def test_compiled_gradients_equal_eager_ones():
    model = randomize(ViT(**SMALL))
    x, upstream = torch.randn(3, 3, 16, 16), torch.randn(3, 5)
    with ops.use_kernels("on"):
        expected = gradients(model, model(x), upstream)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        mine = gradients(model, compiled(x), upstream)
        before = launches_made()
        compiled(torch.randn(5, 3, 16, 16))
        assert launches_made() > before
    for name, theirs in expected.items():
        assert_close(mine[name], theirs, atol=1e-6, rtol=1e-5, name=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_gives_outputs_of_its_dtype_and_fp32_gradients(dtype):
    """The error's norm is at most twice PyTorch's under the same autocast, and one rounding.

    Of the output and of the gradients.
    """
    model = randomize(ViT(**SMALL), std=0.2)
    x, upstream = torch.randn(2, 3, 16, 16), torch.randn(2, 5)
    exact = copy.deepcopy(model).double()
    out = exact(x.double())
    truth = gradients(exact, out, upstream.double()) | {"output": out}

    def errors(mode):
        with ops.use_kernels(mode), torch.autocast("cpu", dtype):
            out = model(x)
        results = gradients(model, out, upstream.to(dtype))
        assert out.dtype == dtype and all(grad.dtype == torch.float32 for grad in results.values())
        results["output"] = out
        return {name: ((t.double() - truth[name]).norm() / truth[name].norm()).item() for name, t in results.items()}

    own = errors("off")
    for name, error in errors("on").items():
        assert error <= 2 * own[name] + torch.finfo(dtype).eps / 2, f"{name}: {error:.2e}, PyTorch {own[name]:.2e}"


def test_activation_checkpointing_gives_the_same_bits():
    model = randomize(ViT(**SMALL))
    x, upstream = torch.randn(2, 3, 16, 16), torch.randn(2, 5)
    results = []
    with ops.use_kernels("on"):
        for enable in (False, True):
            model.set_grad_checkpointing(enable)
            results.append(gradients(model, model(x), upstream))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def test_export_traces_plain_pytorch_with_a_dynamic_batch():
    model = randomize(ViT(**SMALL)).eval()
    with ops.use_kernels("on"):
        program = torch.export.export(
            model, (torch.randn(2, 3, 16, 16),), dynamic_shapes={"images": {0: torch.export.Dim("batch")}}
        )
    assert not any("vitfast" in str(node.target) for node in program.graph.nodes)
    x = torch.randn(4, 3, 16, 16)
    assert_close(program.module()(x), model(x), atol=1e-5)


def head_start() -> ViT:
    torch.manual_seed(0)
    model = ViT(**SMALL, weight_init="jax_nlhb")
    torch.nn.init.normal_(model.head.weight, std=0.1)
    return model


def one_of_two(kind: str, folder: Path) -> None:
    """A rank's two steps on its half of each batch; the first one saves what came out."""
    interpreter.quicken()
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), head_start()
    if kind == "ddp":
        run = torch.nn.parallel.DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        run = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    train(run, [(images[rank::2], labels[rank::2]) for images, labels in torch.load(folder / "data.pt")])
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(state, folder / "state.pt")
    dist.destroy_process_group()


def train(model: torch.nn.Module, data) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ops.use_kernels("on"):
        for images, labels in data:
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow(7)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_equal_one(tmp_path, kind):
    torch.manual_seed(3)
    data = [(torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))) for _ in range(2)]
    torch.save(data, tmp_path / "data.pt")
    done(ranks(2, one_of_two, kind, tmp_path))
    model = head_start()
    train(model, data)
    state = torch.load(tmp_path / "state.pt")
    for name, value in model.state_dict().items():
        assert_close(state[name], value, atol=1e-6, rtol=1e-5, name=name)


@pytest.mark.slow(10)
def test_doctor_passes_here(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "69 of 69 passed" in out and "interpreter" in out, out


def test_doctor_takes_the_interpreter_by_itself():
    """Without TRITON_INTERPRET in the environment; for one operation, in its three dtypes and two forms."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "vitfast", "doctor", "--only", "linear_gelu"], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0 and "6 of 6 passed" in done.stdout and "interpreter" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "attention" not in done.stdout


def test_doctor_names_the_operations_there_are(capsys):
    assert main(["doctor", "--only", "atention"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(
        "vitfast: error: no operation has 'atention' in its name; there are layer_norm; rms_norm; add_layer_norm;"
    )


def test_doctor_finds_a_planted_error(monkeypatch, capsys):
    from vitfast import doctor
    from vitfast.kernels import attention

    right = attention.attention_fwd
    monkeypatch.setattr(
        doctor, "cases", lambda sizes, ops, every=doctor.cases: {"attention": every(sizes, ops)["attention"]}
    )
    assert doctor.doctor() == 0
    monkeypatch.setattr(attention, "attention_fwd", lambda *args: (right(*args)[0] * 1.01, right(*args)[1]))
    assert doctor.doctor() == 1
    assert "FAILED" in capsys.readouterr().out
    monkeypatch.setattr(attention, "attention_fwd", lambda *args: 1 / 0)
    assert doctor.doctor() == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
