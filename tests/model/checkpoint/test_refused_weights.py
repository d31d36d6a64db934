"""Files and tensors of other models, spoiled ones, contradictions: one line that names the source and the thing."""

import functools
import pickle
import re

import numpy as np
import open_clip.transformer
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from checkpoints import (
    HEADS,
    SMALL,
    VISION,
    WITHOUT_HEAD,
    D,
    P,
    google,
    made,
    meta,
    randomised,
    refused,
    small_timm,
    stacked,
)

from vitfast import InputError, ViT, load_checkpoint

NO_TABLE = "there is no position table, "
TWO_NAMES = "are two names of the same tensor"


# ---- tensors, whoever reads them

ZEROS, ONES = torch.zeros, torch.ones


def arrays(w):
    return {key: torch.from_numpy(value) for key, value in w.items()}


@functools.cache
def state_of(kind):
    """The tensors of a small model; every test makes a dictionary of its own of them."""
    if kind == "timm":
        return small_timm(init_values=0.1, reg_tokens=1).state_dict()
    if kind == "google":
        return arrays(google())
    if kind == "meta":
        return meta(randomised(timm.create_model("vit_small_patch16_dinov3_qkvb", **WITHOUT_HEAD)))
    return made(kind).state_dict()


def without(name):
    return lambda s: {k: v for k, v in s.items() if not k.endswith(name)}


def adds(names, value=None):
    return lambda s: s | {name: ZEROS(2) if value is None else value for name in names.split()}


def casts(name, to):
    return lambda s: {k: to(v) if k == name else v for k, v in s.items()}


def copies(first, second):
    return lambda s: s | {second: s[first]}


def mixed(state):
    return {f"module.{k}" if k.endswith("bias") else k: v for k, v in state.items()}


QKV, QUERY = "blocks.0.attn.qkv.weight", "layers.0.attention.q_proj.weight"
RESNET = "missing patch_embed.proj.weight, blocks.0.attn.qkv.weight, .*; unexpected conv1.weight, .* and 119 more"
TENSORS = [
    ("timm", lambda s: torchvision.models.resnet18().state_dict(), f"not a Vision Transformer as timm, .*{RESNET}"),
    ("timm", lambda s: {}, "not a Vision Transformer"),
    ("timm", adds("patch_embed.backbone.layers.0.weight"), "hybrid.*not supported yet"),
    ("timm", adds("patch_embed.backbone.conv1.0.weight"), "a hybrid with another CNN than the paper's ResNet"),
    ("timm", adds("vit.embeddings.patch_embeddings.backbone.bit.weight"), "hybrid.*not supported yet"),
    ("timm", adds("params/img/MAPHead_0/probe"), "attention pooling.*not supported yet"),
    ("timm", adds("rope.freqs"), "learned rotary positions.*not supported yet"),
    ("timm", adds("conv_proj.conv_bn_relu_0.0.weight"), "convolutional stem.*not supported yet"),
    ("timm", adds("blocks.0.attn.rel_pos.relative_position_bias_table"), "relative positions.*not supported yet"),
    ("timm", adds("blocks.0.attn.norm.weight"), "norms inside attention.*not supported yet"),
    ("timm", copies("blocks.0.ls1.gamma", "blocks.0.gamma_1"), f"ls1.gamma and .*gamma_1 {TWO_NAMES}"),
    ("timm", copies("reg_token", "dist_token"), f"reg_token and dist_token {TWO_NAMES}"),
    (
        "timm",
        lambda s: s | {f"blocks.0.attn.{n}.weight": s[QKV][:D] for n in "qkv"},
        f"q.weight and .*qkv.*{TWO_NAMES}",
    ),
    ("ViTModel", copies("embeddings.cls_token", "vit.embeddings.cls_token"), TWO_NAMES),
    ("ViTForImageClassification", copies("classifier.weight", "cls_classifier.weight"), f"cls_classifier.*{TWO_NAMES}"),
    ("ViTModel", copies(QUERY, "encoder.layer.0.attention.attention.query.weight"), TWO_NAMES),
    (
        "google",
        lambda s: s | {k: torch.from_numpy(v) for k, v in stacked(google()).items()},
        f"encoderblock/.*{TWO_NAMES}",
    ),
    ("timm", mixed, r"names behind 'module\.'; missing .*; unexpected module\."),
    ("ViTModel", mixed, r"names behind 'module\.'; missing .*; unexpected module\."),
    *(
        (
            "timm",
            casts("head.weight", lambda t, d=d: t.to(d)),
            f"head.weight is {d} of shape .*, expected values of float64",
        )
        for d in (torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
    ),
    *(  # joined, an int8 beside floats would be floats
        (
            "ViTModel",
            casts(QUERY.replace("q_", f"{n}_"), torch.Tensor.char),
            rf"attn\.{n}\.weight is torch.int8 of shape",
        )
        for n in "qkv"
    ),
    *(("timm", casts(k, torch.Tensor.to_sparse), f"{k} is sparse, expected a dense") for k in ("head.weight", QKV)),
    (
        "timm",
        casts("head.weight", lambda t: t.to("meta")),
        "head.weight is on the meta device, expected a dense",
    ),
    *(
        ("timm", lambda s, k=k, n=n: s | {k: ZEROS(n)}, f"{k}.* of shape")
        for k in ("blocks.0.mlp.fc1.weight", QKV, "patch_embed.proj.weight")
        for n in ((), (0, 48), (4,))
    ),
    ("google", adds("embedding/kernel", ZEROS(P * P * 3, D)), "a NaFlex ViT"),
    ("google", adds("head/bias", ZEROS(())), ""),
    ("google", adds("Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"), "of unexpected shapes"),
    ("google", adds("Transformer/encoderblock_0/LayerNorm_0/scale", ZEROS(7)), "norm1.weight is .7,. for .48,."),
    ("timm", without("mlp.fc2.weight"), "a timm file without a whole ViT; missing blocks.0.mlp.fc2.weight"),
    ("google", adds("cls", ZEROS(D)), "cls_token of shape"),
    ("google", adds("conv_root/kernel"), "a hybrid of a ResNet's root alone is not supported yet"),
    ("meta", adds("rope_embed.periods", torch.tensor([1.0, 5.0, 6.0, 7.0])), "no powers of one base"),
    ("meta", adds("rope_embed.periods", ZEROS(2, 2)), "periods of shape"),
    ("meta", adds("cls_norm.weight cls_norm.bias", ONES(48)), "another last norm of its class token"),
    ("meta", adds("blocks.0.mlp.w3.weight", ONES(48, 48)), TWO_NAMES),
    ("timm", lambda s: open_clips(attentional_pool=True, attn_pooler_heads=3), "an attentional pooler makes"),
    ("timm", lambda s: clip_classifier(), "a classifier on CLIP's patches before their last norm"),
]


def open_clips(**options):
    return open_clip.transformer.VisionTransformer(32, 8, 48, 1, 3, 2.0, output_dim=48, **options).state_dict()


def clip_classifier():
    config = transformers.CLIPConfig(vision_config=VISION)
    return transformers.CLIPForImageClassification(config).state_dict()


def numbered(rows):
    """Names for the rows of a table: their number and what they say."""
    return [f"{i}-{row[-1][:24]}" for i, row in enumerate(rows)]


@pytest.mark.parametrize("kind, change, says", TENSORS, ids=numbered(TENSORS))
def test_tensors_of_another_model(tmp_path, kind, change, says):
    """By load_checkpoint too, but for shapes that only the model shows to be odd."""
    torch.save(change(state_of(kind)), tmp_path / "w.pth")
    whole = says and not re.search("of shape|for .48", says)
    refused(tmp_path / "w.pth", says, (ViT.from_pretrained, load_checkpoint)[: 1 + bool(whole)], num_heads=HEADS)


# ---- tensors alone, and arguments that they contradict

PLAIN = small_timm().state_dict()
NO_NORM, NO_POSITIONS = ({k: v for k, v in PLAIN.items() if k != name} for name in ("norm.weight", "pos_embed"))
EXTRA = {f"blocks.0.extra_{i}.weight": ZEROS(2) for i in range(5)}
GAMMA = {re.sub(r"ls([12])\.gamma", r"gamma_\1", k): v for k, v in small_timm(init_values=0.1).state_dict().items()}
DISTILLED = timm.models.deit.VisionTransformerDistilled(**SMALL).state_dict()
SIZES = "a timm checkpoint with embed_dim=48, .*"
THREE = dict(num_heads=HEADS)
ARGUMENTS = [
    (PLAIN, dict(), "how many heads there are, and no preset has embed_dim=48, depth=2; pass num_heads="),
    (PLAIN, dict(embed_dim=64), f"{SIZES}expected embed_dim=64, not 48.*cls_token is .1, 1, 48. for .1, 1, 64."),
    (PLAIN, dict(depth=3), "expected depth=3, not 2; missing blocks.2.norm1.weight, .* and 9 more; unexpected none"),
    (PLAIN, dict(depth=1), "expected depth=1, not 2; missing none; unexpected blocks.1.norm1.weight, .* and 9 more"),
    (PLAIN, dict(patch_size=16), "expected patch_size=16, not 8"),
    (PLAIN, dict(in_chans=1), "reads in_chans=3 channels, expected in_chans=1"),
    (PLAIN, dict(mlp_ratio=4.0), "expected mlp_ratio=4.0, not 2.0"),
    (PLAIN, dict(init_values=1e-5), "expected init_values=1e-05, not None; missing blocks.0.ls1.gamma"),
    (PLAIN, dict(global_pool="avg", fc_norm=True), "expected fc_norm=True, not False; missing fc_norm.weight"),
    (PLAIN, dict(img_size=33), "image size 33 x 33 is no multiple"),
    (PLAIN, dict(num_clases=2), "unknown argument of from_pretrained 'num_clases'; did you mean num_classes"),
    *((PLAIN, {name: 1}, f"unknown argument of from_pretrained '{name}'") for name in ("self", "args", "kwargs")),
    (NO_NORM | EXTRA, {}, f"{SIZES}missing norm.weight; .* and 2 more"),
    (
        PLAIN | {"blocks.999999999.norm1.bias": ZEROS(D)},
        {},
        "depth must be a whole number from 1 to 1000",
    ),
    (GAMMA, {}, "gamma_1: so it is .* in timm's models with rotary positions.*pass pos_embed='learn'"),
    (DISTILLED, {}, "distilled DeiT has two heads"),
    (
        small_timm(img_size=(16, 72)).state_dict(),
        {},
        "a position table of 19 .* is no square grid; pass img_size=",
    ),
    (
        {k: v for k, v in PLAIN.items() if k != "pos_embed"},
        {},
        f"{NO_TABLE}.*pass rope='dinov3' .*pass pos_embed='none'",
    ),
]


@pytest.mark.parametrize("state, known, says", ARGUMENTS, ids=numbered(ARGUMENTS))
def test_arguments_that_do_not_fit(tmp_path, state, known, says):
    torch.save(state, tmp_path / "w.pth")
    if "unknown argument" in says:
        with pytest.raises(InputError, match=says):
            ViT.from_pretrained(tmp_path / "w.pth", **THREE, **known)
    else:
        refused(tmp_path / "w.pth", says, **({} if "no preset" in says else THREE), **known)


def test_heads_and_gates_that_contradict_the_config(tmp_path):
    model = ViT(**SMALL, swiglu_mlp=True)
    model.save_pretrained(tmp_path / "ours")
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    refused(tmp_path / "ours", "expected num_heads=6, not 3; leave out what differs$", num_heads=6)
    for source in (tmp_path / "ours", tmp_path / "bare.pth"):
        refused(source, "its MLPs are gated, .* not act_layer='gelu'", act_layer="gelu", **THREE)
        ViT.from_pretrained(source, act_layer="silu", **THREE)


# ---- files


def test_unreadable_files(tmp_path):
    safetensors.torch.save_file(PLAIN, tmp_path / "cut.safetensors")
    torch.save(PLAIN, tmp_path / "cut.pth")
    np.savez(tmp_path / "cut.npz", **google())
    for path in sorted(tmp_path.iterdir()):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    for suffix in ("pth", "safetensors", "npz"):
        (tmp_path / f"empty.{suffix}").touch()
    (tmp_path / "text.pth").write_text("hello")
    with open(tmp_path / "inside_out.npz", "wb") as file:
        np.save(file, np.zeros(3))
    for path in sorted(tmp_path.iterdir()):
        refused(path, f"^{path}: not a whole|^{path}: holds a ndarray", (load_checkpoint,))


def test_pickles_are_not_run(tmp_path):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return ran.touch, ()

    class Script(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    for name in ("evil.bin", "evil.npz"):
        with open(tmp_path / name, "wb") as file:
            pickle.dump(Evil(), file, protocol=2)
    np.savez(tmp_path / "objects.npz", **google(), extra=np.array([Evil()], dtype=object))
    torch.save(small_timm(), tmp_path / "model.pt")
    for path in sorted(tmp_path.iterdir()):
        refused(path, "Python objects.*save model.state_dict", (load_checkpoint,))
    torch.jit.script(Script()).save(str(tmp_path / "ViT-B-32.pt"))
    refused(tmp_path / "ViT-B-32.pt", "a TorchScript archive, .*convert it: torch.save.torch.jit.load")
    assert not ran.exists()


def test_wrong_paths_say_what_is_wrong(tmp_path):
    refused(tmp_path / "nowhere.npz", "no such file or folder")
    refused("owner/name", "write hf-hub:owner/name")
    refused(tmp_path, "no weights in this folder; expected model.safetensors or pytorch_model.bin")
    (tmp_path / "weights.h5").touch()
    refused(tmp_path / "weights.h5", "unknown kind of weights file; known are .safetensors, .npz")
    for name in ("a.pth", "b.pth"):
        torch.save(torch.zeros(3), tmp_path / name)
    refused(tmp_path, "several weights files .a.pth, b.pth.")
    refused(tmp_path / "a.pth", "holds a Tensor, expected a dictionary")
    for source in (None, 3, b"x", " ", ""):
        with pytest.raises(InputError, match="no weights given: give a file, a folder or hf-hub:owner/name"):
            ViT.from_pretrained(source)
    for source in (5000 * "x", "~nobody-is-called-so/x"):
        refused(source, "cannot be read")
