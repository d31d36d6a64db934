"""Memory against what a run keeps, by PyTorch's own account."""

import gc
from itertools import accumulate

import pytest
import torch
from cost_models import TINY, on_meta

import vitfast
from vitfast import InputError, ViT, ops
from vitfast.model import activation_memory as keep
from vitfast.model.config import KEEPS
from vitfast.tools.cost.gpus import GIB, Rates, rates
from vitfast.tools.cost.memory import kept_bytes, state_bytes, working_bytes
from vitfast.tools.cost.steps import operations
from vitfast.tools.cost.text import as_text
from vitfast.tools.cost.training import estimate

IMAGES = torch.randint(0, 256, (3, 3, 16, 24), dtype=torch.uint8)


def kept(model: ViT, images: torch.Tensor = IMAGES, autocast: torch.dtype | None = None) -> int:
    """Bytes that a forward pass on the kernels keeps for its backward, beside parameters and buffers."""
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned and storage.nbytes() > tensor.itemsize:  # one number stands for a shape
            storages[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with ops.use_kernels("on"), hooks, torch.autocast("cpu", autocast, enabled=autocast is not None):
        assert model(images).requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    "options, dtype",
    [
        ({}, torch.float32),
        (dict(representation_size=24, depth=1), torch.float16),
        (dict(class_token=False, global_pool="avg", pos_embed="sincos2d", init_values=0.1), torch.float32),
        (dict(global_pool="avg", fc_norm=False, depth=1, num_heads=1), torch.float16),
        (dict(residual_in_fp32=True, reg_tokens=2), torch.float16),
        (dict(backbone=dict(layers=[1]), depth=1), torch.float32),
        (dict(pos_embed="learn2d", pos_embed_at="layers", num_heads=1), torch.float32),
        (dict(rope="dinov3", pos_embed="none", reg_tokens=2, swiglu_mlp=True), torch.float16),
        (dict(rope="cat", swiglu_mlp=True, scale_mlp_norm=True, depth=1), torch.float32),
        (dict(pre_norm=True, act_layer="quick_gelu"), torch.float16),
        (dict(norm_layer="rmsnorm", pre_norm=True), torch.float32),
        (dict(class_token=False, global_pool="map"), torch.float32),
    ],
    ids=str,
)
@pytest.mark.slow
def test_memory_is_what_a_run_keeps(options, dtype):
    """With the least kept, and with all."""
    model = ViT(**TINY | options, keep="least").to(dtype).train()
    assert kept(model) == sum(kept_bytes(model, 3, dtype.itemsize).values())
    model.set_keep("all")
    more = sum(kept_bytes(model, 3, dtype.itemsize, keep="all").values())
    assert kept(model) == more > sum(kept_bytes(model, 3, dtype.itemsize).values())


def test_memory_of_packed_crops():
    """The mean over each crop of a pack keeps its input too, and the pack its places, under 64 bytes a token."""
    model = ViT(**TINY, class_token=False, global_pool="avg", keep="least").train()
    sizes = [(2, (16, 24)), (3, (8, 16))]
    crops = [torch.zeros(3, *side, dtype=torch.uint8) for count, side in sizes for _ in range(3 * count)]
    found = estimate(model, rates(), dtype="fp32", crops=sizes)
    more = kept(model, vitfast.pack(crops, 8)) - 3 * sum(found["memory"]["kept_per_image"].values())
    tokens = 3 * found["tokens"]
    assert tokens == 3 * (2 * 6 + 3 * 2) and tokens * 32 * 4 < more < tokens * (32 * 4 + 64)


def test_memory_with_dropout():
    """A mask is a byte for each number on a GPU; on a CPU torch keeps it in the dtype of what it masks."""
    model = ViT(**TINY | dict(depth=1), proj_drop_rate=0.1, pos_drop_rate=0.1).train()
    wanted = kept_bytes(model, 3, 4)
    wanted["masks (dropout)"] *= 4
    assert kept(model) == sum(wanted.values())
    # blocks run on the smaller operations: nothing that backward writes goes away with keep="all"
    model = on_meta("B/16", proj_drop_rate=0.1)
    least, everything = (operations(model, 2, keep=choice) for choice in ("least", "all"))
    assert least == everything != operations(on_meta("B/16"), 2, keep="all")
    found = [estimate(model, rates("H200"), keep=choice) for choice in KEEPS]
    assert found[0] == found[1] == found[2] and found[0]["keep"]["more_per_image"] == 0
    assert "keep has no effect with dropout" in as_text("B/16", found[0])


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
        found, each = state_bytes(model, 4, name), sum(p.grad.nbytes for p in model.parameters())
        assert found["optimiser state"] == sum(t.nbytes for t in tensors)
        assert found["parameters"] == found["gradients"] == each and not found["16-bit copies"]


def test_the_largest_batch_is_the_last_that_fits():
    model = on_meta("B/16")
    found = estimate(model, rates("A100-40"), batch_size=10**6)
    largest, usable = found["largest_batch"], keep.USABLE * 40 * GIB

    def needed(batch):
        parts = state_bytes(model).values(), kept_bytes(model, batch).values(), [working_bytes(model, batch)]
        return sum(map(sum, parts))

    assert needed(largest) <= usable < needed(largest + 1)
    assert found["micro_batch"] <= largest and found["micro_batch"] * found["accumulate"] >= 10**6
    assert estimate(on_meta("H/14"), Rates("H200", 1e12, 1e12, GIB))["largest_batch"] == 0


def peak_of_two_steps(model: ViT, batch: int) -> int:
    """Bytes that PyTorch allocates for two training steps on the kernels, at most at a time."""
    images, labels = torch.zeros(batch, 3, 16, 24, dtype=torch.uint8), torch.zeros(batch, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    gc.collect()  # or what other tests have left is freed, and counted, meanwhile
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with ops.use_kernels("on"), torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        for _ in range(2):
            with torch.autocast("cpu", torch.float16):
                logits = model(images)
            torch.nn.functional.cross_entropy(logits.float(), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize(
    "options, batch",
    [(dict(embed_dim=128), 1), (dict(embed_dim=16, num_heads=1, num_classes=3000), 16)],
    ids=["weights", "logits"],
)
@pytest.mark.slow
def test_all_is_kept_where_two_steps_fit(monkeypatch, options, batch):
    """What a model decides by the memory that is free, against what its steps allocate."""
    model = ViT(**TINY | dict(depth=1) | options, keep="all").train()
    peak = peak_of_two_steps(model, batch)
    model.set_keep("auto")
    monkeypatch.setattr(keep, "DEVICES", ("cpu",))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    for buckets in (0, sum(p.nbytes for p in model.parameters())):  # in which DDP copies the gradients
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda ranks=buckets > 0: ranks)
        for room, wanted in ((peak + buckets - 1, "least"), (1.4 * (peak + buckets), "all")):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=room / keep.USABLE: (free - 2, 0))
            assert model.decide_keep(batch, torch.float16) == wanted


def test_a_model_is_told_what_to_keep_or_keeps_the_least():
    model = ViT(**TINY)
    assert model.decide_keep(3) == "least"
    model(torch.rand(1, 3, 16, 24))
    assert model.keep == "auto" and {block.keep for block in model.blocks} == {"least"} and "keep" not in model.config
    with pytest.raises(InputError, match="keep must be one of 'auto', 'all', 'least', got 'most'"):
        ViT(**TINY, keep="most")


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
    total = sum(wanted.values()) - wanted["images"] + state_bytes(model)["16-bit copies"]
    assert held == pytest.approx(total, rel=0.02)
