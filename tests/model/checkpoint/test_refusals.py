"""What is no whole ViT, or another one, or contradicts itself: one line that names the source and the thing."""

import functools
import json
import math
import re
import shutil

import checkpoints as c
import open_clip.transformer
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from checkpoints import HEADS, SMALL, D, refused
from timm.models._hub import save_for_hf
from timm_names import small as small_timm_of

from vitfast import InputError, ViT, load_checkpoint
from vitfast.model.convert import write

BOTH = (ViT.from_pretrained, load_checkpoint)
TIMM, VIT, DINOV3 = "vit_base_patch16_224", "ViTForImageClassification", "DINOv3ViTModel"
ZEROS, ONES = torch.zeros, torch.ones


# ---- how a row makes its source in a folder: returns the source, the functions that refuse it and their arguments


@functools.cache
def template(root, name):
    """A folder with a small checkpoint of that library or class, made once."""
    folder = root / name
    if name == "vitfast":
        ViT(**SMALL, class_names=list("abcde"), init_values=0.1).save_pretrained(folder)
    elif name in (TIMM, f"{TIMM}, average"):
        pooling = dict(global_pool="avg") if "average" in name else {}
        save_for_hf(timm.create_model(TIMM, **SMALL, **pooling), folder, safe_serialization=True)
    elif name.startswith("vit_"):
        save_for_hf(small_timm_of(name, act_layer="gelu"), folder, safe_serialization=True)
    elif name == "torchvision":
        folder.mkdir()
        write(c.small(), folder / "w.safetensors", "torchvision")
    else:
        gated = dict(use_gated_mlp=True) if name.endswith(", gated") else {}
        c.made(name.removesuffix(", gated"), **gated).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("templates")


def config(name, change=None, beside="config.json", **fields):
    """A folder whose config.json is another text, what `change` makes of it, or has these fields."""

    def make(root, tmp_path):
        folder = shutil.copytree(template(root, name), tmp_path / "w")
        path = folder / beside
        content = json.loads(path.read_text()) if path.exists() else {}
        content = change if isinstance(change, str) else json.dumps(change(content) if change else content | fields)
        path.write_text(content)
        return folder, BOTH[:1], {}

    return make


def nested(inside, name=TIMM, **fields):
    """A folder whose config.json has these fields in an object of it."""
    return config(name, lambda content: content | {inside: content[inside] | fields})


def training(arch=TIMM, **args):
    """A checkpoint of timm's training script with these arguments: there is no config.json to speak of."""

    def make(root, tmp_path):
        given = dict(model_kwargs=dict(num_heads=HEADS)) | args
        torch.save(dict(state_dict=PLAIN, arch=arch, args=given), tmp_path / "w.pth")
        return tmp_path / "w.pth", BOTH[:1], {}

    return make


@functools.cache
def state_of(kind):
    """The tensors of a small model."""
    if kind == "timm":
        return c.small_timm(init_values=0.1, reg_tokens=1).state_dict()
    if kind == "google":
        return {key: torch.from_numpy(value) for key, value in c.google().items()}
    if kind == "meta":
        return c.meta(c.randomised(timm.create_model("vit_small_patch16_dinov3_qkvb", **c.WITHOUT_HEAD)))
    return c.made(kind).state_dict()


def tensors(kind, change, calls=BOTH):
    """Tensors alone, changed: neither a model nor a state dict is made of them."""

    def make(root, tmp_path):
        torch.save(change(state_of(kind)), tmp_path / "w.pth")
        return tmp_path / "w.pth", calls, dict(num_heads=HEADS)

    return make


def shapes(kind, change):
    """Tensors alone whose shapes only the model shows to be odd."""
    return tensors(kind, change, BOTH[:1])


def bare(state=None, heads=True, **known):
    """Whole tensors alone that do not say all, or contradict an argument."""

    def make(root, tmp_path):
        torch.save(PLAIN if state is None else state(), tmp_path / "w.pth")
        return tmp_path / "w.pth", BOTH[:1], (dict(num_heads=HEADS) | known if heads else known)

    return make


def without(*names, of=None):
    return {key: value for key, value in (PLAIN if of is None else of).items() if key not in names}


def adds(names, value=None):
    return lambda s: s | {name: ZEROS(2) if value is None else value for name in names.split()}


def casts(name, to):
    return lambda s: {k: to(v) if k == name else v for k, v in s.items()}


def copies(first, second):
    return lambda s: s | {second: s[first]}


def mixed(state):
    return {f"module.{k}" if k.endswith("bias") else k: v for k, v in state.items()}


def open_clips(state):
    options = dict(attentional_pool=True, attn_pooler_heads=3, output_dim=48)
    return open_clip.transformer.VisionTransformer(32, 8, 48, 1, 3, 2.0, **options).state_dict()


def clip_classifier(state):
    return transformers.CLIPForImageClassification(transformers.CLIPConfig(vision_config=c.VISION)).state_dict()


def table(length, **extra):
    """The tensors of a model with a position table of that length."""
    extra["no_embed_class"] = extra.get("class_token", True)
    return c.small(img_size=(c.P * length, c.P), **extra).state_dict()


def peft_layers(state):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(c.small_timm(), peft.LoraConfig(target_modules=["qkv"]))
    return {f"net.{k}": v for k, v in model.state_dict().items()}


def half_wrapped(state):
    return {("" if ".mlp." in k else "net.") + k: v for k, v in PLAIN.items()}


def old_gammas():
    state = c.small_timm(init_values=0.1).state_dict()
    return {re.sub(r"ls([12])\.gamma", r"gamma_\1", k): v for k, v in state.items()}


PLAIN = c.small_timm().state_dict()
EXTRA = {f"blocks.0.extra_{i}.weight": ZEROS(2) for i in range(5)}
QKV, QUERY, HEAD = "blocks.0.attn.qkv.weight", "layers.0.attention.q_proj.weight", "head.weight"
RESNET = "missing patch_embed.proj.weight, blocks.0.attn.qkv.weight, .*; unexpected conv1.weight, .* and 119 more"
TWO_NAMES, SIZES = "are two names of the same tensor", "a timm checkpoint with embed_dim=48, .*"
UNKNOWN = "which vitfast .* does not know"
CHANNELS = "must be one number or one for each of the 3 channels, got 2"
# Fields of another function or of other sizes, which the error names.
FIELDS = dict(qkv_bias=False, intermediate_size=64, patch_size=16, pruned_heads={"0": [1]}, is_decoder=True)
FIELDS |= dict(position_embedding_type="rotary", use_rope=False)
ARGUMENTS = dict(qk_norm=True, pre_norm=True, final_norm=False, norm_layer="rmsnorm", attn_layer="diff")
ARGUMENTS |= dict(global_pool="avgmax", rope_type="cat", embed_dim=64)

# Lengths of position tables, what else their models have, and the grids that fill them.
TABLES = [
    (225, {}, r"14 x 16 \+ 1 \(img_size=\(112, 128\), .* or 15 x 15 \+ 0 \(img_size=\(120, 120\), .*; pass th"),
    (25, dict(reg_tokens=4), r"4 x 5 \+ 5 .* or 5 x 5 \+ 0 "),
    (4, dict(reg_tokens=2), r"1 x 1 \+ 3 .* or 2 x 2 \+ 0 "),  # both are squares
    (224, {}, "no square grid; pass img_size="),
    (224, dict(class_token=False, global_pool="avg"), "no square grid; pass img_size="),
]

REFUSED = [
    # Hugging Face's config.json
    (config(VIT, model_type="vit_mae"), "config.json: model_type 'vit_mae' is not this ViT; known are vit"),
    (config(VIT, model_type="dpt"), "model_type 'dpt' is not this ViT"),
    (config(DINOV3, architectures=["DINOv3ViTBackbone"]), "architecture 'DINOv3ViTBackbone' is .*known are D.*Model"),
    *((config(VIT, **{field: value}), field) for field, value in FIELDS.items()),
    (config(VIT, hidden_act="relu"), "activation 'relu' is not supported"),
    (config(VIT, num_hidden_layers=3), "depth"),
    (config(VIT, image_size=64), "images of 64 x 64, and a position table"),
    (config(VIT, image_size=dict(height=32)), "image_size must be a whole number of pixels"),
    (config(VIT, model_type="deit", architectures=["DeiTModel"]), "model_type"),
    (config(VIT, architectures="ViTModel"), "architectures must be a list of names, got 'ViTModel'"),
    (config(VIT, id2label={"0": "a", "00": "b", "1": "c"}), "id2label names class 0 twice"),
    (config(VIT, id2label=dict(a="b")), "id2label must be names of classes"),
    (config(VIT, num_attention_heads=True), "num_attention_heads must be a whole number"),
    (config(VIT, layer_norm_eps="1e-6"), "layer_norm_eps must be a number from 0 to 3.4e.38, got '1e-6'"),
    (config(VIT, warp="avg"), f"has 'warp', {UNKNOWN}"),
    (config(VIT, beside="preprocessor_config.json", image_mean=[0.1, 0.2]), f"r_config.json: image_mean {CHANNELS}"),
    (nested("vision_config", "CLIPModel", hidden_act="relu"), "vision_config: activation 'relu'"),
    (nested("vision_config", "CLIPModel", warp=1), "vision_config has 'warp'"),
    (config("CLIPModel", vision_config=3), "vision_config must be an object, got 3"),
    (config("CLIPModel", architectures=["CLIPForImageClassification"]), "architecture 'CLIPForImageClassification'"),
    (config("CLIPModel", model_type="siglip", architectures=["SiglipModel"]), "the tensors are those of .* CLIP"),
    (config(DINOV3, use_gated_mlp=True, hidden_act="silu"), "swiglu_mlp=True, the tensors swiglu_mlp=F"),
    (config(DINOV3, rope_theta=-1), "rope_theta must be "),
    (
        config("SiglipVisionModel", '{"model_type": "siglip2_vision_model", "num_patches": 15}'),
        "num_patches must be a square, as SigLIP 2's grid is, got 15",
    ),
    (config(f"{DINOV3}, gated"), "act_layer='gelu', and the ViT's gated MLP has only 'silu'"),  # transformers' default
    # timm's config.json
    *((nested("model_args", **{field: value}), field) for field, value in ARGUMENTS.items()),
    (nested("model_args", act_layer="relu"), "activation"),
    (nested("model_args", warp=9), "model_args has 'warp'"),
    (config(TIMM, warp=9), f"has 'warp', {UNKNOWN}"),
    (nested("pretrained_cfg", warp=9), "pretrained_cfg has 'warp'"),
    (nested("pretrained_cfg", std=[0.1, 0.2]), f"std {CHANNELS}"),
    (nested("pretrained_cfg", input_size=224), "input_size must be .channels, height, width., got 224"),
    (config(TIMM, model_args=3), "model_args must be an object, got 3"),
    (config(TIMM, global_pool="max", model_args={}), "global_pool='max' is not supported"),
    (config(TIMM, architecture="vit_base_patch16_rpn_224"), "timm's 'vit_base_patch16_rpn_224' has its norms after"),
    (  # on whose names timm fails; what it pools nobody says
        config(f"{TIMM}, average", lambda content: without("global_pool", of=content) | dict(model_args=SMALL)),
        "config.json says nothing of fc_norm, .*global_pool='token'",
    ),
    # our config.json
    (config("vitfast", "{not json"), "config.json: not readable as JSON"),
    (config("vitfast", "[1]"), "config.json: expected a JSON object, got a list"),
    (config("vitfast", warp=9), f"has 'warp', {UNKNOWN}"),
    *(
        (config("vitfast", functools.partial(lambda n, content: without(n, of=content), n)), f"lacks {n}; copy the fol")
        for n in ("num_heads", "mean")
    ),
    (config("vitfast", depth=10**9), "depth must be a whole number from 1 to 1000, got 1000000000"),
    (config("vitfast", reg_tokens=60_000), "reg_tokens=60000, the tensors reg_tokens=0"),
    (config("vitfast", drop_rate=math.nan), "drop_rate must be a number from 0 to 1, got nan"),
    (config("vitfast", class_names=["a"]), "class_names must name each of the 5 classes, got 1 names"),
    # timm's training
    (training(std=[0, 0, 0]), "std must be "),
    (training(model_kwargs=dict(warp=1)), "model_kwargs has 'warp'"),
    (training(model_kwargs=3), "model_kwargs must be an object, got 3"),
    (training(gp="max"), "gp='max' is not supported"),
    (training(model_kwargs=dict(act_layer="relu")), "activation 'relu' is not supported"),
    (training(model_kwargs=dict(qk_norm=True)), "qk_norm=True, the tensors qk_norm=False"),
    (training("vit_small_patch16_rope_ape_224"), "timm's 'vit_small_patch16_rope_ape_224' has rotary"),
    (training("my_vit"), "does not know if timm's 'my_vit'"),
    # tensors of other models
    (tensors("timm", lambda s: torchvision.models.resnet18().state_dict()), f"not a Vision .* as timm, .*{RESNET}"),
    (tensors("timm", lambda s: {}), "not a Vision Transformer"),
    (tensors("timm", adds("patch_embed.backbone.layers.0.weight")), "hybrid.*not supported yet"),
    (tensors("timm", adds("patch_embed.backbone.conv1.0.weight")), "a hybrid with another CNN than the paper's ResNet"),
    (tensors("timm", adds("params/img/MAPHead_0/probe")), "attention pooling.*not supported yet"),
    (tensors("timm", adds("rope.freqs")), "learned rotary positions.*not supported yet"),
    (tensors("timm", adds("conv_proj.conv_bn_relu_0.0.weight")), "convolutional stem.*not supported yet"),
    (tensors("timm", adds("blocks.0.attn.rel_pos.relative_position_bias_table")), "relative positions.*not supported"),
    (tensors("timm", adds("blocks.0.attn.norm.weight")), "norms inside attention.*not supported yet"),
    (tensors("google", adds("conv_root/kernel")), "a hybrid of a ResNet's root alone is not supported yet"),
    (tensors("google", adds("embedding/kernel", ZEROS(192, D))), "a NaFlex ViT"),
    (tensors("meta", adds("rope_embed.periods", torch.tensor([1.0, 5.0, 6.0, 7.0]))), "no powers of one base"),
    (tensors("meta", adds("cls_norm.weight cls_norm.bias", ONES(48))), "another last norm of its class token"),
    (tensors("timm", open_clips), "an attentional pooler makes"),
    (tensors("timm", clip_classifier), "a classifier on CLIP's patches before their last norm"),
    # two names, one name
    (tensors("timm", copies("blocks.0.ls1.gamma", "blocks.0.gamma_1")), f"ls1.gamma and .*gamma_1 {TWO_NAMES}"),
    (
        tensors("timm", lambda s: s | {f"blocks.0.attn.{n}.weight": s[QKV][:D] for n in "qkv"}),
        f"q.weight and .*qkv.*{TWO_NAMES}",
    ),
    (tensors("ViTModel", copies("embeddings.cls_token", "vit.embeddings.cls_token")), TWO_NAMES),
    (tensors("google", lambda s: s | {k: torch.from_numpy(v) for k, v in c.stacked(c.google()).items()}), TWO_NAMES),
    (tensors("meta", adds("blocks.0.mlp.w3.weight", ONES(48, 48))), TWO_NAMES),
    (tensors("timm", half_wrapped), "names are behind 'net.', and others are not .blocks.0.mlp.fc1.weight"),
    (tensors("timm", peft_layers), r"peft's layers in it; save model.merge_and_unload\(\).state_dict\(\)"),
    *((tensors(kind, mixed), r"behind 'module\.'; missing .*; unexpected module\.") for kind in ("timm", "ViTModel")),
    # values and shapes
    *(
        (tensors("timm", casts(HEAD, lambda t, d=d: t.to(d))), f"{HEAD} is {d} of shape .*, expected values of float64")
        for d in (torch.int8, torch.bool, torch.float8_e4m3fn)
    ),
    # joined, an int8 beside floats would be floats
    (tensors("ViTModel", casts(QUERY, torch.Tensor.char)), r"attn\.q\.weight is torch.int8"),
    (tensors("timm", casts(HEAD, torch.Tensor.to_sparse)), f"{HEAD} is sparse, expected a dense"),
    (tensors("timm", casts(HEAD, lambda t: t.to("meta"))), f"{HEAD} is on the meta device, expected a dense"),
    *((shapes("timm", adds(QKV, ZEROS(n))), f"{QKV}.* of shape") for n in ((), (0, 48), (4,))),
    (
        tensors("google", adds("Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel")),
        "of unexpected",
    ),
    (shapes("google", adds("Transformer/encoderblock_0/LayerNorm_0/scale", ZEROS(7))), "norm1.weight is .7,. for .48,"),
    (shapes("google", adds("cls", ZEROS(D))), "cls_token of shape"),
    (shapes("meta", adds("rope_embed.periods", ZEROS(2, 2))), "periods of shape"),
    (tensors("timm", lambda s: without("blocks.0.mlp.fc2.weight", of=s)), "without a whole ViT; missing .*fc2.weight"),
    # whole tensors, and arguments that they contradict or that they need
    (bare(heads=False), "how many heads there are, and no preset has embed_dim=48, depth=2; pass num_heads="),
    (bare(embed_dim=64), f"{SIZES}expected embed_dim=64, not 48.*cls_token is .1, 1, 48. for .1, 1, 64."),
    (bare(depth=3), "expected depth=3, not 2; missing blocks.2.norm1.weight, .* and 9 more; unexpected none"),
    (bare(depth=1), "expected depth=1, not 2; missing none; unexpected blocks.1.norm1.weight, .* and 9 more"),
    (bare(patch_size=16), "expected patch_size=16, not 8"),
    (bare(in_chans=1), "reads in_chans=3 channels, not 1; leave in_chans out, and .* repeat the grey channel"),
    (bare(mlp_ratio=4.0), "expected mlp_ratio=4.0, not 2.0"),
    (bare(init_values=1e-5), "expected init_values=1e-05, not None; missing blocks.0.ls1.gamma"),
    (bare(global_pool="avg", fc_norm=True), "expected fc_norm=True, not False; missing fc_norm.weight"),
    (bare(img_size=33), "image size 33 x 33 is no multiple"),
    (bare(lambda: without("norm.weight") | EXTRA), f"{SIZES}missing norm.weight; .* and 2 more"),
    (bare(lambda: PLAIN | {"blocks.999999999.norm1.bias": ZEROS(D)}), "depth must be a whole number from 1 to 1000"),
    (bare(old_gammas), "gamma_1: so it is .* in timm's models with rotary positions.*pass pos_embed='learn'"),
    (bare(timm.models.deit.VisionTransformerDistilled(**SMALL).state_dict), "distilled DeiT has two heads"),
    # position tables that no square fills, or more than one grid; at no size, and at a size that is none of them
    *(
        (bare(functools.partial(table, n, **extra), act_layer="gelu", **size), f"table of {n} entries is {grids}")
        for size in ({}, dict(img_size=31 * c.P))
        for n, extra, grids in TABLES
    ),
    (bare(lambda: without("pos_embed")), "no position table, .*pass rope='dinov3' .*pass pos_embed='none'"),
    (bare(ViT(**SMALL, swiglu_mlp=True).state_dict, act_layer="gelu"), "MLPs are gated, .* not act_layer='gelu'"),
]


@pytest.mark.quick(34)
@pytest.mark.parametrize("make, says", REFUSED, ids=[f"{i}-{says[:24]}" for i, (_, says) in enumerate(REFUSED)])
def test_refused(tmp_path, root, make, says):
    source, calls, known = make(root, tmp_path)
    of_training = make.__qualname__.startswith("training")
    refused(source, f"^(?!.*config.json).*({says})" if of_training else says, calls, **known)


LOST = [
    *((name, "position_embeddings") for name in (VIT, "DeiTModel", "Dinov2ForImageClassification")),
    ("Dinov2WithRegistersModel", "position_embeddings"),
    *((name, "vision_model.embeddings.position_embedding.weight") for name in ("CLIPModel", "SiglipModel")),
    (TIMM, "pos_embed"),
    ("torchvision", "encoder.pos_embedding"),
]


@pytest.mark.parametrize("name, lost", LOST)
def test_a_lost_position_table(tmp_path, root, name, lost):
    """Of a folder, and of its tensors alone, whoever claims that there was none."""
    folder = shutil.copytree(template(root, name), tmp_path / "w")
    (weights,) = folder.glob("*.safetensors")
    state = {k: v.clone() for k, v in safetensors.torch.load_file(weights).items() if not k.endswith(lost)}
    for path in (weights, tmp_path / "bare.safetensors"):
        safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    says = "there is no position table.*" + ("always has one" if name != TIMM else "pass pos_embed='none'")
    refused(folder if name != "torchvision" else weights, says, num_classes=0, num_heads=HEADS)
    if name == TIMM:
        assert ViT.from_pretrained(folder, pos_embed="none").config["pos_embed"] == "none"
    else:
        refused(tmp_path / "bare.safetensors", says, num_classes=0, pos_embed="none", num_heads=HEADS)


def test_arguments_that_no_tensors_have(tmp_path):
    ViT(**SMALL, swiglu_mlp=True).save_pretrained(tmp_path)
    refused(tmp_path, "expected num_heads=6, not 3; leave out what differs$", num_heads=6)
    refused(tmp_path, "its MLPs are gated, .* not act_layer='gelu'", act_layer="gelu")
    ViT.from_pretrained(tmp_path, act_layer="silu", num_heads=HEADS)
    for name in ("num_clases", "self", "args", "kwargs"):
        with pytest.raises(InputError, match=f"unknown argument of from_pretrained '{name}'"):
            ViT.from_pretrained(tmp_path, **{name: 1})
