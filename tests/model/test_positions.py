"""Table 8's position embeddings against formulas in float64; what resizing does to each."""

import pickle
import re

import pytest
import torch
from checks import assert_close, gradients, randomize
from timm.layers import resample_abs_pos_embed

import vitfast.layers
from vitfast import ViT
from vitfast.model.positions import resample_offsets, resize_table
from vitfast.model.preprocessing import FIELDS, Preprocessing

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


def truth(p: dict[str, torch.Tensor], options: dict, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and attention matrices of SMALL with these options, with nothing but einsum.

    p: a state dict in float64.
    """
    kind, place = options.get("pos_embed", "learn"), options.get("pos_embed_at", "stem")
    prefix = [p[t] for t in ("cls_token", "reg_token") if t in p]
    first = sum(t.shape[1] for t in prefix)
    h, w = GRID
    patches = images.unflatten(2, (h, 8)).unflatten(4, (w, 8)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(2)
    x = torch.einsum("bnk,dk->bnd", patches, p["patch_embed.proj.weight"].flatten(1)) + p["patch_embed.proj.bias"]
    x = torch.cat([*(t.expand(len(x), -1, -1) for t in prefix), x], 1)

    def positions(layer: int) -> torch.Tensor:
        """(T + N, D), zeros for tokens without a position."""
        layer = layer if place == "layers" else 0
        rows = []
        for token in range(first + N):
            row, column = divmod(token - first, w)
            if kind == "learn" and options.get("no_embed_class"):
                rows.append(p["pos_embed"][layer, token - first] if token >= first else torch.zeros(D).double())
            elif kind == "learn":
                rows.append(p["pos_embed"][layer, token])
            elif kind == "learn2d" and token >= first:
                rows.append(torch.cat([p["pos_embed_x"][layer, column], p["pos_embed_y"][layer, row]]))
            else:
                rows.append(torch.zeros(D).double())
        return torch.stack(rows)

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    maps = []
    for i in range(DEPTH):
        if i == 0 or place != "stem":
            x = x + positions(i)
        b = f"blocks.{i}."
        qkv = torch.einsum("bnd,ed->bne", norm(x, b + "norm1"), p[b + "attn.qkv.weight"]) + p[b + "attn.qkv.bias"]
        q, k, v = qkv.unflatten(-1, (3, HEADS, HEAD)).unbind(2)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k)
        if kind == "relative":
            extra = torch.zeros_like(logits)
            for one in range(N):
                for other in range(N):
                    key = p["pos_embed_rel"][i, one - other + N - 1]
                    extra[:, :, first + one, first + other] = torch.einsum("bhd,d->bh", q[:, first + one], key)
            logits = logits + extra
        maps.append((logits / HEAD**0.5).softmax(-1))
        o = torch.einsum("bhqk,bkhd->bqhd", maps[-1], v).flatten(2)
        y = torch.einsum("bnd,ed->bne", o, p[b + "attn.proj.weight"]) + p[b + "attn.proj.bias"]
        x = x + y * p.get(b + "ls1.gamma", 1.0)
        y = torch.einsum("bnd,ed->bne", norm(x, b + "norm2"), p[b + "mlp.fc1.weight"]) + p[b + "mlp.fc1.bias"]
        y = y * (1 + torch.erf(y / 2**0.5)) / 2
        x = x + (torch.einsum("bnd,ed->bne", y, p[b + "mlp.fc2.weight"]) + p[b + "mlp.fc2.bias"]) * p.get(
            b + "ls2.gamma", 1.0
        )
    average = options.get("global_pool") == "avg"
    out = norm(x[:, first:].mean(1), "fc_norm") if average else norm(x[:, 0], "norm")
    return torch.einsum("bd,cd->bc", out, p["head.weight"]) + p["head.bias"], maps


@pytest.mark.parametrize("version", ["one object", "each attribute in its own place"])
def test_a_model_is_read_that_was_pickled_where_its_classes_were_before(version):
    model, x = ViT(**SMALL, pos_embed="relative").eval(), torch.randn(2, 3, 16, 24)
    assert vitfast.layers.PatchEmbed is type(model.patch_embed) and (truth := model(x)).shape == (2, 5)
    for block in model.blocks:
        block.attn.__class__ = vitfast.layers.Attention
    model.crop_pct, model.class_names = 0.9, list("abcde")
    config = model.config
    names = vars(model).pop("class_names")
    if version == "one object":
        model.preprocessing = Preprocessing()
        vars(model.preprocessing).update({name: vars(model).pop(name) for name in FIELDS}, class_names=names)
    else:
        model._config["class_names"] = names
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(x), truth) and again.config == config and again.crop_pct == 0.9


@pytest.mark.parametrize("name", KINDS)
def test_logits_maps_and_gradients_from_the_formulas(name):
    """And of the tables: neither decayed nor large at the start."""
    fresh = ViT(**{**SMALL, **KINDS[name]})
    assert set(fresh._tables) <= fresh.no_weight_decay() & set(dict(fresh.named_parameters()))
    assert all(0.01 < getattr(fresh, table).std() < 0.03 for table in fresh._tables)
    assert not fresh._tables or re.match(fresh.group_matcher()["stem"], fresh._tables[0])
    model = made(name).double()
    leaves = {k: v.detach().clone().requires_grad_() for k, v in model.state_dict().items()}
    x = torch.randn(2, 3, 16, 24).double()
    out, (expected, maps) = model(x), truth(leaves, KINDS[name], x)
    assert_close(out, expected, **EXACT)
    for a, b in zip(model.attention_maps(x), maps):
        assert_close(a, b.detach(), **EXACT)
    upstream = torch.randn_like(out)
    mine, theirs = gradients(model, out, upstream), torch.autograd.grad(expected, list(leaves.values()), upstream)
    assert mine.keys() == leaves.keys() >= set(model._tables)
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
