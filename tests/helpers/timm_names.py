"""timm's models with a ViT's name, made small, and what becomes of a checkpoint of each."""

import json
import re
from pathlib import Path

import timm
import torch
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT
from vitfast.model.checkpoint.timm import by_name

PATTERNS = "vit* deit* eva* beit* flexivit* test_vit* naflexvit* samvit* aimv2*".split()
SIZES = r"(x?small|tiny|base|large|huge|xlarge|giant|giantopt|gigantic|medium|mediumd|betwixt|little|wee|so\d+m2?|\d+b)"
CLASSES = 5
TOL = 1e-5  # of the largest logit, fp32 on both sides


def names() -> list[str]:
    listed = sorted({name for pattern in PATTERNS for name in timm.list_models(pattern)})
    return [name for name in listed if not name.startswith("vit_fast_")]  # ours, where they are registered


def ours(name: str) -> dict:
    """The arguments that a name stands for, {} where vitfast does not list it."""
    try:
        return by_name(name)
    except InputError:
        return {}


def one_of_each_kind() -> list[str]:
    """Names that differ in more than sizes, but for hybrids, which are large."""
    kinds = {re.sub(r"\d+", "N", re.sub(rf"_{SIZES}(?=_|$)", "_SIZE", name)): name for name in reversed(names())}
    return sorted(name for name in kinds.values() if not re.search(r"_r\d+_|resnet|vitamin|_mci_", name))


def tagged() -> list[str]:
    """name.tag of every pretrained model that vitfast lists and whose config is no other tag's of that name."""
    kinds, about = (
        {},
        ("tag", "hf_hub_id", "hf_hub_filename", "url", "file", "license", "notes", "custom_load", "origin_url"),
    )
    for name in filter(ours, names()):
        for full in timm.list_models(f"{name}.*", pretrained=True):
            config = timm.get_pretrained_cfg(full).to_dict()
            kinds.setdefault((name, repr({k: v for k, v in config.items() if k not in about})), full)
    return sorted(kinds.values())


def small(name: str, **changes) -> torch.nn.Module:
    """The model with two blocks and a narrow width for small images, random weights that show every difference.

    A model that vitfast lists keeps timm's own number of heads: only its name tells it. One whose factory does not take
    a width is as wide as timm makes it. name: with a tag, of its image size and number of classes.
    """
    plain, _, tag = name.partition(".")
    heads, found = ours(plain).get("num_heads", 4), re.search(r"patch(\d+)|_s(\d+)_", plain)
    size = 2 * int(next(filter(None, found.groups())) if found else 32)
    told = {} if ours(plain) else dict(num_heads=heads)
    kept = dict(depth=2) | ({} if tag else dict(num_classes=CLASSES, img_size=size)) | changes
    for options in (
        kept | dict(embed_dim=16 * heads, **told),
        kept | dict(embed_dim=16 * heads, num_kv_heads=heads, **told),
        kept | dict(embed_dim=64),
        kept,
    ):
        try:
            model = timm.create_model(name, **options).eval()
            break
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError):
            continue
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.normal_(std=0.1 if p.dim() < 2 else p[0].numel() ** -0.5, generator=random)
            if p.dim() == 1 and key.endswith(("weight", "gamma", "gamma_1", "gamma_2")):
                p.add_(1)
    return model


def images(model) -> torch.Tensor:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or (32, 32)
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def outcome(source: Path, model, **arguments) -> str:
    """ "equal" to timm's logits, "refused: ..." with the reason, or what no checkpoint may do."""
    try:
        ours = ViT.from_pretrained(source, **arguments).eval()
    except InputError as error:
        return f"refused: {str(error).removeprefix(f'{source}: ')}"
    with torch.no_grad():
        x = images(model)
        if ours.config["rope"] and not ours._tables:  # nothing but the name tells the size
            ours.set_input_size(x.shape[2:])
        mine, theirs = ours(x), model(x)
    error = ((mine - theirs).abs().max() / theirs.abs().max()).item()
    return "equal" if error < TOL else f"wrong by {error:.1e}"


def outcomes(model, folder: Path) -> dict[str, str]:
    """Of the folder that timm writes, of one without model_args (the name alone), and of the bare tensors.

    The bare ones get the number of heads, which no tensor says.
    """
    save_for_hf(model, folder, safe_serialization=True)
    result = {"folder": outcome(folder, model)}
    config = json.loads((folder / "config.json").read_text())
    config.pop("model_args", None)
    (folder / "config.json").write_text(json.dumps(config))
    result["name"] = outcome(folder, model)
    bare = (folder / "model.safetensors").rename(folder / "bare.safetensors")
    heads = next((m.num_heads for m in model.modules() if isinstance(getattr(m, "num_heads", None), int)), None)
    return result | {"bare": outcome(bare, model, **({"num_heads": heads} if heads else {}))}
