"""Import this before torchvision or timm, where torchvision's operators cannot be loaded.

PyPI has torchvision for CUDA only. Beside a torch for CPUs, its import ends where it describes operators that are not
there. Neither the transforms nor the networks use them, so it is enough that their names exist.
"""

import torch

library = torch.library.Library("torchvision", "DEF")
try:
    import torchvision  # noqa: F401
except RuntimeError:
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        library.define(schema)
