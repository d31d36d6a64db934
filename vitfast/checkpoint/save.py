"""From a model to files: vitfast's own folder, and the formats of `writers`, each read back before it takes its place."""

from pathlib import Path

from ..errors import InputError
from ..files import write_atomically
from ..version import __version__
from .writers import tensors, write_json, write_tensors


def save(model, folder: str | Path) -> None:
    """Writes `folder/model.safetensors` and `folder/config.json`, each replaced atomically; makes the folder.

    The state dict is written as it is (dtypes too), from any device; config.json holds `model.config`, the library and its version.
    """
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{folder}: a file is in the way; give a folder") from error
    state = tensors(model)
    config = {
        "library": "vitfast",
        "library_version": __version__,
        "architecture": type(model).__name__,
        **model.config,
    }
    write_atomically(folder / "model.safetensors", lambda path: write_tensors(state, path))
    write_atomically(folder / "config.json", lambda path: write_json(config, path))
