"""Run timm's BlurPool2d: timm_blurpool.py INPUT.pt OUTPUT.pt. The input are images, the output those sampled by 2."""

import sys

import torch
import without_operators  # noqa: F401
from timm.layers import BlurPool2d

images = torch.load(sys.argv[1], weights_only=True)
torch.save(BlurPool2d(images.shape[1], filt_size=3, stride=2, pad_mode="constant")(images), sys.argv[2])
