"""The section on the nearest neighbours of images, by the features of a model without a head."""

import dataclasses

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.transforms.functional import resize

from ...data.loader import Data
from ...data.samples import ONE
from ...data.sources import Subset, evenly
from ...eval.fewshot import features
from ...eval.inspect.page import picture
from ...model.vit import ViT

SEARCHED, ASKED, NEAREST = 1000, 12, 5  # images among which neighbours are sought, for how many, and how many each
PIXELS = 64  # the height of an image in the picture


def neighbours(model: ViT, data: Data) -> dict[str, tuple[str, str]]:
    """The section, by its heading. model: in eval mode."""
    from ...eval.inspect.figures import as_png, draw_rows

    labelled, data = data.probe is data, dataclasses.replace(data, workers=0, ranks=ONE)
    found = features(model, data, source := Subset(data.train, evenly(len(data.train), SEARCHED)))
    x = F.normalize(found.x - found.x.mean(0), dim=1)
    asked = torch.tensor(evenly(len(x), ASKED))
    similarity = x[asked] @ x.T
    similarity[torch.arange(len(asked)), asked] = -torch.inf
    nearest = similarity.topk(min(NEAREST, len(x) - 1)).indices
    rows = torch.cat([asked[:, None], nearest], 1)
    shown = Subset(source, found.index[rows.flatten()].tolist())
    images = torch.cat([batch for batch, _, _ in data.in_order(shown)])
    side = (PIXELS, round(PIXELS * images.shape[3] / images.shape[2]))
    pixels = np.moveaxis(resize(images, side, antialias=True).unflatten(0, rows.shape).numpy(), 2, -1)
    note = f"The first image of each row is one of {len(asked)}, spread over {len(x):,} training images; of these the "
    note += "nearest by the cosine of their features follow."
    if labelled:
        same = (found.y[nearest] == found.y[asked][:, None]).double().mean().item()
        note += f" {same:.0%} of them are of the class of their image."
    return {"Neighbours": (note, picture(as_png(draw_rows(pixels)), "images and their nearest neighbours"))}
