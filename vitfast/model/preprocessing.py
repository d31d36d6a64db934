"""The preprocessing of a model's images, and the names of its classes: one object."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from torch import nn

from .config import ViTConfig, class_names

# How evaluations resize and cut images where neither weights nor settings say.
CROP = dict(crop_mode="center", crop_pct=1.0, interpolation="bicubic")


@dataclass(frozen=True)
class Preprocessing:
    """How images are prepared, and what the classes are called; the fields are arguments of ViTConfig."""

    mean: tuple[float, ...]  # (C,), like std; for raw uint8 images, on the 0..1 scale
    std: tuple[float, ...]
    crop_mode: str | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    class_names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, config: ViTConfig) -> "Preprocessing":
        """The preprocessing that a ViT's arguments describe."""
        return cls(**{name: getattr(config, name) for name in FIELDS})

    def as_dict(self) -> dict:
        """The fields as arguments of a ViT, without `class_names` if they are None."""
        names = FIELDS if self.class_names is not None else FIELDS[:-1]
        return {name: getattr(self, name) for name in names}


FIELDS = tuple(field.name for field in fields(Preprocessing))


def _field(name: str) -> property:
    """A field of `model.preprocessing`, read and set on the model."""

    def put(model: "Preprocessed", value) -> None:
        model.preprocessing = replace(model.preprocessing, **{name: value})

    return property(lambda model: getattr(model.preprocessing, name), put)


class Preprocessed:
    """A ViT with its `preprocessing`, whose fields are the model's own attributes too."""

    preprocessing: Preprocessing
    num_classes: int
    in_chans: int
    patch_embed: nn.Module
    mean, std, crop_mode, crop_pct, interpolation = map(_field, FIELDS[:5])

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, in the order of the logits; None if they are unknown."""
        return self.preprocessing.class_names

    @class_names.setter
    def class_names(self, names: Sequence[str] | None) -> None:
        names = None if names is None else class_names(names, self.num_classes)
        self.preprocessing = replace(self.preprocessing, class_names=names)

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

    def __setstate__(self, state: dict) -> None:
        if "preprocessing" not in state:  # pickled by a version that kept each field as an attribute of the model
            told = {name: state.pop(name, None) for name in FIELDS[:5]}
            state["preprocessing"] = Preprocessing(**told, class_names=state["_config"].pop("class_names", None))
        super().__setstate__(state)
