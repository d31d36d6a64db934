"""Table 8's position embeddings against formulas in float64; what resizing does to each."""

import re
from functools import partial
from itertools import product

import pytest
import torch
from checks import assert_close, gradients, randomize
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer

from vitfast import ViT
from vitfast.model.positions import resample_offsets, resize_table

SMALL = dict(img_size=(16, 24), patch_size=8, embed_dim=24, depth=3, num_heads=3, num_classes=5)
GRID, N, D, DEPTH, HEADS, HEAD = (2, 3), 6, 24, 3, 3, 8
EXACT = dict(atol=1e-10, rtol=1e-10)  # float64 on both sides
TOL = dict(atol=1e-5)  # fp32: the same formula in another order of sums

KINDS = {
    "learn, stem": dict(),
    "learn, layers": dict(pos_embed_at="layers"),
    "learn, layers, patches only": dict(pos_embed_at="layers", no_embed_class=True, reg_tokens=2),
    "learn, shared": dict(pos_embed_at="layers_shared", reg_tokens=1),
    "learn2d, stem": dict(pos_embed="learn2d"),
    "learn2d, layers": dict(pos_embed="learn2d", pos_embed_at="layers", reg_tokens=1),
    "learn2d, shared, average": dict(
        pos_embed="learn2d", pos_embed_at="layers_shared", class_token=False, global_pool="avg"
    ),
    "relative": dict(pos_embed="relative", reg_tokens=1, init_values=0.3),
    "relative, average": dict(pos_embed="relative", class_token=False, global_pool="avg"),
    "none": dict(pos_embed="none"),
}


def made(name: str, **changes) -> ViT:
    """A model of that kind with random weights, its positions large enough to matter."""
    model = randomize(ViT(**{**SMALL, **KINDS[name], **changes}), 0.3)
    for table in model._tables:
        torch.nn.init.normal_(getattr(model, table))
    return model


def truth(model: ViT, kind: str, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], dict]:
    """Logits, attention matrices and parameters of timm's model, into which the formulas of Table 8 are put."""
    options = {"pos_embed": "learn", "pos_embed_at": "stem", **KINDS[kind]}
    positions, place = options.pop("pos_embed"), options.pop("pos_embed_at")
    peer, first, maps = VisionTransformer(**SMALL, **options, pos_embed="none").double(), model.num_prefix_tokens, []
    peer.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name not in model._tables})
    tables = {name: getattr(model, name).detach().clone().requires_grad_() for name in model._tables}

    def add(layer: int, block, args) -> tuple[torch.Tensor]:
        """The tokens before a layer; those without a position get zeros."""
        layer, rows = layer if place == "layers" else 0, []
        for token in range(first + N):
            row, column = divmod(token - first, GRID[1])
            if positions == "learn" and options.get("no_embed_class"):
                rows.append(tables["pos_embed"][layer, token - first] if token >= first else torch.zeros(D).double())
            elif positions == "learn":
                rows.append(tables["pos_embed"][layer, token])
            elif positions == "learn2d" and token >= first:
                rows.append(torch.cat([tables["pos_embed_x"][layer, column], tables["pos_embed_y"][layer, row]]))
            else:
                rows.append(torch.zeros(D).double())
        return (args[0] + torch.stack(rows),)

    def attend(attn, layer: int, x: torch.Tensor, **_) -> torch.Tensor:
        q, k, v = attn.qkv(x).unflatten(-1, (3, HEADS, HEAD)).unbind(2)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k)
        for one, other in product(range(N), repeat=2) if positions == "relative" else ():
            key = tables["pos_embed_rel"][layer, one - other + N - 1]
            logits[:, :, first + one, first + other] += torch.einsum("bhd,d->bh", q[:, first + one], key)
        maps.append((logits / HEAD**0.5).softmax(-1))
        return attn.proj(torch.einsum("bhqk,bkhd->bqhd", maps[-1], v).flatten(2))

    for layer, block in enumerate(peer.blocks):
        block.attn.forward = partial(attend, block.attn, layer)
        if layer == 0 or place != "stem":
            block.register_forward_pre_hook(partial(add, layer))
    return peer(images), maps, dict(peer.named_parameters()) | tables


@pytest.mark.parametrize("name", KINDS)
def test_logits_maps_and_gradients_from_the_formulas(name):
    """And of the tables: neither decayed nor large at the start."""
    fresh = ViT(**{**SMALL, **KINDS[name]})
    assert set(fresh._tables) <= fresh.no_weight_decay() & set(dict(fresh.named_parameters()))
    assert all(0.01 < getattr(fresh, table).std() < 0.03 for table in fresh._tables)
    assert not fresh._tables or re.match(fresh.group_matcher()["stem"], fresh._tables[0])
    model = made(name).double()
    x = torch.randn(2, 3, 16, 24).double()
    out, (expected, maps, leaves) = model(x), truth(model, name, x)
    assert_close(out, expected, **EXACT)
    for a, b in zip(model.attention_maps(x), maps):
        assert_close(a, b.detach(), **EXACT)
    upstream = torch.randn_like(out)
    mine, theirs = gradients(model, out, upstream), torch.autograd.grad(expected, list(leaves.values()), upstream)
    assert mine.keys() == leaves.keys()
    for key, theirs_of_key in zip(leaves, theirs):
        assert_close(mine[key], theirs_of_key, **EXACT, name=key)
    for table in model._tables:  # every position is used, except by a last layer of which only a class token is read
        unread = int(table == "pos_embed_rel" and model.has_class_token)
        assert (mine[table][: DEPTH - unread].abs().amin(-1) > 0).all() and (mine[table][DEPTH - unread :] == 0).all()
    model.set_grad_checkpointing()
    for key, again in gradients(model, model(x), upstream).items():
        assert_close(again, mine[key], **EXACT, name=key)


def test_two_tables_resize_as_their_2d_table_does_in_timm():
    x, y = torch.randn(2, 3, 4), torch.randn(2, 2, 4)

    def joined(x, y):
        return torch.stack([torch.cat([x[:, j], y[:, i]], -1) for i in range(y.shape[1]) for j in range(x.shape[1])], 1)

    expected = torch.cat(
        [resample_abs_pos_embed(t[None], new_size=[5, 7], old_size=[2, 3], num_prefix_tokens=0) for t in joined(x, y)]
    )
    mine = joined(resize_table("pos_embed_x", x, (2, 3), (5, 7), 1), resize_table("pos_embed_y", y, (2, 3), (5, 7), 1))
    assert_close(mine, expected, atol=1e-6)


def test_offsets_resize_through_their_displacements():
    table, old, new = torch.randn(2, 11, 4), (2, 3), (3, 5)
    plane = torch.stack([table[:, dy * 3 + dx + 5] for dy in range(-1, 2) for dx in range(-2, 3)], 1)
    plane = torch.cat(
        [resample_abs_pos_embed(t[None], new_size=[5, 9], old_size=[3, 5], num_prefix_tokens=0) for t in plane]
    ).unflatten(1, (5, 9))
    places = [(row, column) for row in range(3) for column in range(5)]
    seen = {}
    for i, q in enumerate(places):  # every pair of patches of the new grid
        for j, k in enumerate(places):
            seen.setdefault(i - j, []).append(plane[:, q[0] - k[0] + 2, q[1] - k[1] + 4])
    expected = torch.stack([torch.stack(seen[offset]).mean(0) for offset in range(-14, 15)], 1)
    mine = resample_offsets(table, old, new)
    assert_close(mine, expected, atol=1e-6)
    assert resample_offsets(table, old, old) is table
    assert_close(resample_offsets(torch.ones(1, 11, 2), old, new), torch.ones(1, 29, 2), atol=1e-6)
    with pytest.raises(ValueError, match="11 offsets"):
        resample_offsets(torch.randn(1, 13, 4), old, new)


@pytest.mark.parametrize("name", KINDS)
def test_saved_loaded_and_resized(name, tmp_path):
    model, x, other = made(name).eval(), torch.randn(2, 3, 16, 24), torch.randn(2, 3, 32, 24)
    model.save_pretrained(tmp_path)
    dynamic = ViT.from_pretrained(tmp_path, dynamic_img_size=True).eval()
    assert dynamic.config == model.config | dict(dynamic_img_size=True)
    assert_close(dynamic(x), model(x), atol=0)
    resized = ViT.from_pretrained(tmp_path, img_size=(32, 24)).eval()
    model.set_input_size((32, 24))
    assert all(isinstance(getattr(model, t), torch.nn.Parameter) for t in model._tables)
    assert model(other).isfinite().all() and ViT(**model.config).load_state_dict(model.state_dict())
    assert_close(resized(other), model(other), atol=0)
    out = dynamic(other)
    assert_close(out, model(other), **TOL)
    found = gradients(dynamic, out, torch.randn_like(out))
    assert all(found[t].abs().sum() > 0 for t in dynamic._tables)
