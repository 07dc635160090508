"""Read and write safetensors files with the format's own library: safetensors_files.py TENSORS.pt OURS THEIRS.

Checks that the file OURS has the tensors of TENSORS.pt, writes these to THEIRS, and prints the metadata of OURS.
"""

import json
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

expected = torch.load(sys.argv[1], weights_only=True)
loaded = load_file(sys.argv[2])
assert loaded.keys() == expected.keys()
for name, tensor in expected.items():
    assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape), name
    assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
save_file(expected, sys.argv[3], {"format": "pt"})
with safe_open(sys.argv[2], "pt") as file:
    print(json.dumps(file.metadata()))
