"""Classify images with an exported ResNet in a library's class: classify_exported.py torchvision|timm WEIGHTS IMAGE ...

Needs PyTorch, Pillow, safetensors and the library, and nothing of this project: what the file .classes.json beside the
weights says is all that it knows. Prints the class of each image as a JSON list.
"""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import without_operators  # noqa: F401
from PIL import Image
from safetensors.torch import load_file

library, weights, *images = sys.argv[1:]
description = json.loads(Path(weights).with_suffix(".classes.json").read_text())
assert description["crop"] == "square"
with contextlib.redirect_stdout(sys.stderr):  # timm may say there that an optional package is missing
    if library == "timm":
        from timm import create_model as build
    else:
        from torchvision.models import get_model as build
network = build(description["model"], num_classes=len(description["classes"]))
network.load_state_dict(load_file(weights), strict=True)
network.eval()


def read_input(path: str) -> torch.Tensor:
    """Resize the short side, crop the centre, scale to 0..1, normalize."""
    image = Image.open(path).convert("RGB")
    factor = description["resize_short_side"] / min(image.size)
    image = image.resize((int(image.width * factor), int(image.height * factor)), Image.Resampling.BILINEAR)
    side = description["image_size"]
    left, top = (round((length - side) / 2) for length in image.size)
    pixels = torch.from_numpy(np.array(image.crop((left, top, left + side, top + side)))).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(description[name]).view(3, 1, 1) for name in ("mean", "std"))
    return (pixels - mean) / std


with torch.no_grad():
    scores = [network(read_input(path)[None])[0] for path in images]
print(json.dumps([description["classes"][int(answer.argmax())] for answer in scores]))
