"""The preprocessing of a ViT's images: what evaluations and timm read from a model."""

from torch import nn

# How evaluations resize and cut images where neither weights nor settings say.
CROP = dict(crop_mode="center", crop_pct=1.0, interpolation="bicubic")
FIELDS = ("mean", "std", *CROP)  # arguments of a ViT that are its attributes too, and may be set


def pretrained_cfg(vit: nn.Module, extra: dict | None) -> dict:
    """See ViT.pretrained_cfg. extra: the entries that were set on the model."""
    extra = extra or {}
    if extra.get("num_classes") != vit.num_classes:  # its labels are those of another head
        extra = {name: entry for name, entry in extra.items() if not name.startswith("label_")}
    cfg = {name: getattr(vit, name) or default for name, default in CROP.items()}
    cfg |= dict(mean=vit.mean, std=vit.std, num_classes=vit.num_classes)
    cfg |= dict(input_size=(vit.in_chans, *vit.patch_embed.img_size), fixed_input_size=not vit.dynamic_img_size)
    if vit.class_names is not None:
        cfg["label_names"] = vit.class_names
    conv = "backbone.stem.conv" if hasattr(vit.patch_embed, "backbone") else "proj"
    return dict(first_conv=f"patch_embed.{conv}", classifier="head") | extra | cfg
