"""Small models of other libraries' classes."""

import importlib
import inspect
import sys

WIDTH = 32
# By the names that constructors and configurations have for them: each takes its own.
_NAMES = {
    2: "depth heads layers n_head nhead num_attention_heads num_heads num_hidden_layers num_layers",
    5: "num_classes",
    8: "patch_size",
    16: "image_size img_size output_dim",
    WIDTH: "d_model dim embed_dim hidden_dim hidden_size in_features width",
    2 * WIDTH: "dim_feedforward hidden_features intermediate_size mlp_dim",
    "sdpa": "attn_implementation",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_WINDOW = dict(window_size=(2, 2))  # of constructors; configurations have one number


def imported(value):
    """The thing that "module:name" names, imported now; any other value itself."""
    if not isinstance(value, str) or ":" not in value:
        return value
    module, _, name = value.partition(":")
    return getattr(importlib.import_module(module), name)


def small(cls: type | str, **options):
    """A small module, with options of its constructor or of the configuration that this takes.

    A class and options that are given as "module:name" are imported. A configuration is the one of images that the file
    of the class has imported.
    """
    cls = imported(cls)
    takes = {name for base in cls.__mro__ for name in inspect.signature(base.__init__).parameters}
    own = {name: value for name, value in (_SIZES | _WINDOW).items() if name in takes}
    options = {name: imported(value) for name, value in options.items()}
    if "config" not in takes:
        return cls(**own | options)
    file = vars(sys.modules[cls.__module__])
    configs = [name for name in file if name.endswith("Config") and "trained" not in name.lower()]
    config = file[min(configs, key=lambda name: "Vision" not in name)]
    return cls(config(**_SIZES | options), **own)
