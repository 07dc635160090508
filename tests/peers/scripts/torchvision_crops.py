"""Crop with torchvision.

torchvision_crops.py center INPUT.npz OUTPUT.npz SIZE    each array after Resize(int(1.14 * SIZE)), CenterCrop(SIZE)
torchvision_crops.py random COUNT WIDTHxHEIGHT...        boxes of RandomResizedCrop, printed as lists
torchvision_crops.py trivial INPUT.npz OUTPUT.npz        each array after TrivialAugmentWide with each of the draws
"""

import json
import sys
from unittest import mock

import numpy as np
import torch
import without_operators  # noqa: F401
from PIL import Image
from torchvision import transforms

if sys.argv[1] == "center":
    size = int(sys.argv[4])
    transform = transforms.Compose([transforms.Resize(int(size * 1.14)), transforms.CenterCrop(size)])
    arrays = np.load(sys.argv[2])
    crops = {name: np.asarray(transform(Image.fromarray(arrays[name]))) for name in arrays}
    np.savez(sys.argv[3], **crops)
elif sys.argv[1] == "trivial":
    arrays = dict(np.load(sys.argv[2]))
    draws = torch.from_numpy(arrays.pop("draws"))
    results = {name: [] for name in arrays}
    for name, draw in ((name, draw) for name in arrays for draw in draws):
        with mock.patch("torch.randint", side_effect=draw.view(-1, 1).unbind()):
            image = transforms.TrivialAugmentWide()(Image.fromarray(arrays[name]))
        results[name].append(np.asarray(image))
    np.savez(sys.argv[3], **results)
else:
    torch.manual_seed(0)
    boxes = {}
    for text in sys.argv[3:]:
        width, height = map(int, text.split("x"))
        image = Image.new("RGB", (width, height))
        get_params = transforms.RandomResizedCrop.get_params
        boxes[text] = [get_params(image, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(int(sys.argv[2]))]
    print(json.dumps(boxes))
