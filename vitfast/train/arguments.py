"""The arguments of the ViT that a config trains; they need no PyTorch."""

from ..model.presets import preset
from ..run.config import Config


def model_arguments(config: Config, loaded: bool = False) -> dict:
    """ViT arguments that a recipe decides; `loaded`: those that it may change on loaded weights."""
    arguments = dict(
        pos_drop_rate=config.dropout,
        proj_drop_rate=config.dropout,
        drop_path_rate=config.drop_path,
        residual_in_fp32=config.residual_in_fp32,
        drop_path_mode=config.drop_path_mode,
    )
    if loaded:  # img_size 0: the weights keep their own
        return arguments | (dict(img_size=config.img_size) if config.img_size else {})
    return arguments | dict(
        img_size=config.img_size,
        init_values=config.init_values,
        global_pool=config.global_pool,
        class_token=config.global_pool == "token",
        pos_embed=config.pos_embed,
        pos_embed_at=config.pos_embed_at,
        head_init_bias=config.head_init_bias,
        weight_init=config.weight_init,
        act_layer=config.act_layer,
    )


def vit_arguments(config: Config, classes: int) -> dict:
    """The arguments of a new ViT. Raises InputError for a model that is no preset."""
    shape = preset(config.model)
    hidden = shape["embed_dim"] if config.hidden_head else None
    return {**model_arguments(config), **shape, "num_classes": classes, "representation_size": hidden}
