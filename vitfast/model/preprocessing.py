"""The preprocessing of a ViT's images, and the names of its classes."""

from collections.abc import Sequence

from torch import nn

from .config import class_names

# How evaluations resize and cut images where neither weights nor settings say.
CROP = dict(crop_mode="center", crop_pct=1.0, interpolation="bicubic")
FIELDS = ("mean", "std", *CROP)  # arguments of a ViT that are its attributes too, and may be set


class Preprocessed:
    """How the images of a ViT are prepared, and what its classes are called."""

    mean: tuple[float, ...]  # (C,), like std; for raw uint8 images, on the 0..1 scale
    std: tuple[float, ...]
    crop_mode: str | None
    crop_pct: float | None
    interpolation: str | None
    num_classes: int
    in_chans: int
    patch_embed: nn.Module

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of the logits; None if they are unknown."""
        return vars(self)["class_names"]

    @class_names.setter
    def class_names(self, names: Sequence[str] | None) -> None:
        vars(self)["class_names"] = None if names is None else class_names(names, self.num_classes)

    @property
    def pretrained_cfg(self) -> dict:
        """How images are prepared now, in the names that `timm.data.resolve_model_data_config` reads.

        timm sets it on the models that it builds. What is set supplies the entries that a ViT does not have itself,
        such as `license`; those on pixels and classes are always the model's own.
        """
        told = vars(self).get("pretrained_cfg") or {}
        if told.get("num_classes") != self.num_classes:  # its labels are those of another head
            told = {name: value for name, value in told.items() if not name.startswith("label_")}
        own = {name: getattr(self, name) or default for name, default in CROP.items()}
        own |= dict(mean=self.mean, std=self.std, num_classes=self.num_classes)
        own |= dict(input_size=(self.in_chans, *self.patch_embed.img_size), fixed_input_size=not self.dynamic_img_size)
        if self.class_names is not None:
            own["label_names"] = self.class_names
        conv = "backbone.stem.conv" if hasattr(self.patch_embed, "backbone") else "proj"
        return dict(first_conv=f"patch_embed.{conv}", classifier="head") | told | own

    @pretrained_cfg.setter
    def pretrained_cfg(self, told: dict | None) -> None:
        vars(self)["pretrained_cfg"] = told

    default_cfg = pretrained_cfg  # timm's earlier name
